"""The same numbers on a GPU: kernels of the rows, and a distributed step over nccl."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import models
import tulle
from models import Words, batches, build, worst_difference
from tulle import RowSparse
from tulle.engine.foresight import Foresight
from tulle.partition import Hashed
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


def test_single_values_of_a_tensor_are_reduced_over_nccl():
    mesh = tulle.init(data=-1)
    dense = torch.eye(5).cuda()
    total = tulle.sync.all_reduce(dense.to_sparse(2), mesh["data"], scheme="balanced")
    assert total.is_cuda
    assert torch.equal(total.to_dense(), dense)


def test_rows_have_their_owners_on_the_gpu_as_on_the_cpu():
    rows = torch.arange(0, 100_000, 7)
    partition = Hashed(100_000, 8)
    for here, there in zip(partition.place(rows), partition.place(rows.cuda()), strict=True):
        assert torch.equal(there.cpu(), here)


def test_what_is_foreseen_of_a_gradient_on_the_gpu_is_compared_with_what_is_stored():
    ids = torch.tensor([3, 1, 3]).cuda()
    foresight = Foresight()
    foresight.note(torch.nn.Embedding(9, 2, sparse=True), ids)
    seen = foresight.take()
    assert seen is not None
    right = RowSparse(ids, torch.ones(3, 2).cuda(), 9)
    wrong = RowSparse(ids.flip(0) + 1, torch.ones(3, 2).cuda(), 9)
    assert seen.coalesce(right).indices.tolist() == [1, 3]
    assert seen.is_stored(right)
    assert not seen.is_stored(wrong)


def test_plain_ddp_trains_a_sparse_table_over_nccl_by_the_hook():
    mesh = tulle.init(data=-1)
    reference = torch.nn.EmbeddingBag(20, 4, sparse=True).double()
    ddp = DistributedDataParallel(copy.deepcopy(reference).to(mesh.device))
    ddp.register_comm_hook(None, tulle.sync.ddp_hook)
    ids = torch.tensor([[1, 2, 2], [5, 1, 7]])
    ddp(ids.to(mesh.device)).sum().backward()
    reference(ids).sum().backward()
    assert torch.equal(ddp.module.weight.grad.to_dense().cpu(), reference.weight.grad.to_dense())
