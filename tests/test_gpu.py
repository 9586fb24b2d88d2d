"""The same numbers on a GPU: kernels of the rows, and a distributed step over nccl."""

import copy

import pytest
import torch

import models
import tulle
from models import Words, batches, build, worst_difference
from tulle import RowSparse
from tulle.sync import SCHEMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def test_rows_coalesce_as_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(500, (3000,), generator=generator)
    values = torch.randn(3000, 16, generator=generator, dtype=torch.float64)
    here = RowSparse(indices, values, 500).coalesce()
    there = RowSparse(indices.cuda(), values.cuda(), 500).coalesce()
    assert torch.equal(there.indices.cpu(), here.indices)
    assert torch.allclose(there.values.cpu(), here.values, rtol=1e-12)


def test_a_step_over_nccl_gives_the_numbers_of_the_cpu():
    mesh = tulle.init(data=-1)
    assert torch.distributed.get_backend() == "nccl"
    reference = build(Words, 0)
    model = copy.deepcopy(reference).to(mesh.device)
    model, [optimizer] = tulle.distribute(model, models.momentum(model), mesh, check_finite=True)
    [theirs] = models.momentum(reference)
    for ids in batches(3, 8):
        model(ids.to(mesh.device)).backward()
        reference(ids).backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    assert worst_difference(model.cpu(), reference)[0] < 1e-12


@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
def test_a_sparse_all_reduce_over_nccl(scheme):
    mesh = tulle.init(data=-1)
    grad = RowSparse(torch.tensor([3, 1, 3]).cuda(), torch.ones(3, 4).cuda(), 9)
    total = tulle.sync.all_reduce(grad, mesh["data"], scheme=scheme)
    assert total.values.is_cuda
    assert total.indices.tolist() == [1, 3]
