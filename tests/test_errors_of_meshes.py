"""Bad meshes raise the same clear error on every rank."""

import pytest
import torch
import torch.distributed as dist

import tulle
from models import Words, build
from raised_alike import every_rank_raises, sgd
from ranks import on_ranks
from tulle.errors import MeshError, PlanError


@on_ranks(1, 2)
def test_a_mesh_that_does_not_multiply():
    size = dist.get_world_size()
    run = f"{size} run{'s' if size == 1 else ''}"
    text = f"tulle.init was given data={size} x pipe=2, which needs {2 * size} processes, but {run}: change the sizes"
    with every_rank_raises(MeshError, text):
        tulle.init(data=size, pipe=2)


@on_ranks(1, 2)
def test_an_unknown_axis():
    mesh = tulle.init(data=-1)
    with every_rank_raises(MeshError, f"the mesh has no axis 'model', it has Mesh(data={mesh.size})"):
        mesh["model"]


@on_ranks(2)
def test_a_mesh_with_an_axis_of_another_name():
    model = build(Words, 0)
    text = "the mesh has axis replicas=2; tulle.distribute knows 'data', 'pipe' and 'model': give tulle.init"
    with every_rank_raises(MeshError, text):
        tulle.distribute(model, sgd(model), tulle.init(replicas=-1))


@on_ranks(2)
def test_a_mesh_with_stages_and_nothing_to_cut_by():
    model = build(Words, 0)
    text = "the mesh has axis pipe=2, and nothing says which module lives where: give sample= one batch to measure on"
    with every_rank_raises(PlanError, text):
        tulle.distribute(model, sgd(model), tulle.init(data=1, pipe=2))


@on_ranks(1, 2)
def test_something_else_than_a_mesh():
    model = build(Words, 0)
    tulle.init(data=-1)
    with every_rank_raises(MeshError, "tulle was given a dict as mesh, expected what tulle.init returns"):
        tulle.distribute(model, sgd(model), {"data": 2})


@on_ranks(1, 2)
def test_a_mesh_where_an_axis_is_expected():
    mesh = tulle.init(data=-1)
    for by in (tulle.sync.all_reduce, tulle.sync.characteristics):
        with pytest.raises(MeshError, match=r"was given a Mesh as axis, expected one of a mesh: mesh\['data'\], say"):
            by(torch.ones(3, 2), mesh)
