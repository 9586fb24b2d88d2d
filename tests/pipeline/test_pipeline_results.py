"""What the micro-batches of a step return, all ranks have at its end, as one process has it."""

from dataclasses import dataclass

import torch
from beside_one_process import data
from pipeline_networks import Chain, make, spread

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.comm import traffic


def many_kinds(model, x, number):
    first = model.layers[0](x)
    last = model.layers[-1](first.tanh())
    loss = last.pow(2).mean()
    loss.backward()
    return {
        "losses": [loss, first.sum(), (first * 2).sum().float()],
        "same": (loss, loss),
        "large": (first.repeat(1, 2000), last.repeat(1, 2000)),
        "row": last.sum(0),
        "plain": (x.sum(), number, "text", None),
        "sparse": last.detach().to_sparse(),
        "shape": last.shape,
    }


def placed():
    """A mesh, and a chain with a stage on each of its ranks."""
    mesh, model = tulle.init(pipe=-1), make(Chain)
    return mesh, pipeline.place(model, mesh["pipe"], spread(model, mesh.size))


def leaves(result):
    return torch.utils._pytree.tree_leaves(result)


@on_ranks(1, 2, 3)
def test_results_of_all_kinds_and_stages_are_those_of_one_process():
    _, model = placed()
    reference = make(Chain)
    step = pipeline.step(micro_batches=4)(many_kinds)
    for number in range(2):
        found, expected = (leaves(step(one, data(), number)) for one in (model, reference))
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            for here, there in zip(mine.outputs, other.outputs, strict=True):
                if not isinstance(there, torch.Tensor):
                    assert here == there
                    continue
                assert here.dtype == there.dtype
                assert not here.requires_grad
                torch.testing.assert_close(here.to_dense(), there.detach().to_dense(), rtol=1e-12, atol=1e-13)


@on_ranks(2)
def test_small_results_of_all_micro_batches_go_in_one_message_and_belong_to_the_user():
    mesh, model = placed()

    @pipeline.step(micro_batches=8)
    def step(model, x):
        y = model(x)
        return y.sum(), y.mean()

    step(model, data(16))
    before = traffic.sent_for("pipeline").messages
    sums, means = step(model, data(16))
    assert traffic.sent_for("pipeline").messages - before == (8 + 1 if mesh.rank == 0 else 1 + 1)
    kept = [one.clone() for one in means.outputs]
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    for one in sums.outputs:
        one.mul_(weight)  # in place, and with a gradient
    assert all(map(torch.equal, means.outputs, kept))


@dataclass
class Metrics:
    last: object = None


@on_ranks(2)
def test_tensors_in_an_object_that_is_returned_are_plain_ones():
    _, model = placed()

    @pipeline.step(micro_batches=3)
    def step(model, x):
        return Metrics(model(x).sum())

    for one in step(model, data(6)).last.outputs:
        assert type(one) is torch.Tensor
