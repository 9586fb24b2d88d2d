"""Optimizers of a user's own that look at norms of whole parameters are told those, where ranks have parts of them."""

import pytest
import torch
from torch import nn

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle.errors import GradientError
from tulle.memory import named_shards
from tulle.plan import Memory, Plan


class OfEach(torch.optim.Optimizer):
    """Steps each parameter by itself."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter, state, rate) -> None:
        raise NotImplementedError


class LAMB(OfEach):
    """You et al. (2020), whose rate is the norm of a parameter by that of its update."""

    def update(self, parameter, state, rate):
        if not state:
            state.update(first=torch.zeros_like(parameter), second=torch.zeros_like(parameter.data))
        state["first"].mul_(0.9).add_(parameter.grad, alpha=0.1)
        state["second"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
        update = state["first"] / state["second"].sqrt().add_(1e-6) + 0.01 * parameter
        ratio = parameter.norm().clamp(0, 10) / update.norm()
        parameter.add_(update * ratio, alpha=-rate)


class LARS(OfEach):
    """You et al. (2017)."""

    def update(self, parameter, state, rate):
        update = parameter.grad.add(parameter.data, alpha=0.01)
        ratio = parameter.data.norm() / (parameter.grad.data.norm() + 1e-8)
        state["average"] = update.clone() if not state else state["average"].mul_(0.9).add_(update)
        parameter.data.add_(state["average"] * ratio, alpha=-rate)


class ByRootMeanSquare(OfEach):
    """Updates as large as the parameter, by a sum that is divided by how many it is of."""

    def update(self, parameter, state, rate):
        size = max(1e-3, parameter.norm().item() / parameter.numel() ** 0.5)
        root = parameter.grad.pow(2).sum().div(parameter.grad.numel()).sqrt()
        parameter.sub_(rate * size * parameter.grad / root)


class UnitWise(OfEach):
    """Clips gradients by the norms of rows (Brock et al., 2021)."""

    def update(self, parameter, state, rate):
        gradient = parameter.grad
        if parameter.dim() > 1:
            most = 0.01 * parameter.norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = torch.where(norm > most, gradient * (most / norm.clamp(min=1e-6)), gradient)
        parameter.add_(gradient, alpha=-rate)


def built():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Embedding(13, 8), layer, nn.Linear(8, 6)).double()


def train(model, optimizer, rank=0, ranks=1):
    for step in range(4):
        ids = torch.randint(13, (6, 3), generator=torch.Generator().manual_seed(step))
        model(ids.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(kind, plan, **axes):
    reference, model, mesh = built(), built(), tulle.init(**axes)
    theirs = kind(reference.parameters())
    train(reference, theirs)
    plan = Plan(mesh.shape, memory=Memory(full_shard=True)) if plan == "full_shard" else plan
    model, optimizer = tulle.distribute(model, kind(model.parameters()), mesh, plan=plan)
    train(model, optimizer, mesh["data"].rank if "data" in axes else 0, mesh["data"].size if "data" in axes else 1)
    found = tulle.full_state_dict(model, everywhere=True)
    for name, wanted in reference.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-13)
    kept = {type(value) for state in optimizer.state.values() for value in state.values()}
    assert kept <= {torch.Tensor}, "what it keeps is plain between steps"
    return model


@pytest.mark.parametrize(("kind", "plan"), crossed([LAMB, LARS, ByRootMeanSquare], ["full_shard", "rows", "columns"]))
@on_ranks(2, 3)
def test_on_parts_of_tables_and_of_what_is_shared_out_they_step_as_in_one_process(kind, plan):
    model = compare(kind, plan, data=-1)
    assert plan != "full_shard" or "1.linear1.weight" in named_shards(model)


@pytest.mark.parametrize("kind", [LAMB, LARS, ByRootMeanSquare])
@on_ranks(2)
def test_on_parts_of_layers_they_step_as_in_one_process(kind):
    compare(kind, "auto", model=2)


@on_ranks(2)
def test_gradients_are_clipped_by_norms_of_whole_rows():
    compare(UnitWise, "rows", data=-1)


class RowWiseAdagrad(OfEach):
    """Adagrad with a sum for each row, over the rows that a sparse gradient stores, as recommenders have it."""

    def update(self, parameter, state, rate):
        gradient = parameter.grad.coalesce()
        rows, values = self.numbers(gradient.indices()[0]), gradient.values()
        sums = state.setdefault("sums", torch.zeros(len(parameter), dtype=parameter.dtype))
        sums.index_add_(0, rows, values.pow(2).mean(1))
        roots = sums[rows].sqrt() + sums.index_select(0, rows)
        sums[rows] = sums[rows] * 0.5
        parameter.index_add_(0, rows, values / (roots + 1)[:, None], alpha=-rate)

    def numbers(self, rows):
        return rows


class ByOthersRows(RowWiseAdagrad):
    """Goes by numbers of rows that no gradient has told: whose they are nobody knows."""

    def numbers(self, rows):
        return rows + 0


def of_rows(kind, mesh=None):
    torch.manual_seed(0)
    table = nn.Embedding(13, 8, sparse=True).double()
    optimizer = kind(table.parameters())
    if mesh is not None:
        tulle.distribute(table, optimizer, mesh, plan="rows")
    train(table, optimizer, *(() if mesh is None else (mesh.rank, mesh.size)))
    return table, optimizer


@on_ranks(1, 2, 3)
def test_sums_of_rows_are_taken_by_the_numbers_that_a_sparse_gradient_has_told():
    (wanted, _), (table, optimizer) = of_rows(RowWiseAdagrad), of_rows(RowWiseAdagrad, tulle.init(data=-1))
    found = tulle.full_state_dict(table, everywhere=True)["weight"]
    torch.testing.assert_close(found, wanted.weight.detach(), rtol=1e-12, atol=1e-13)
    assert type(optimizer.state[table.weight]["sums"]) is torch.Tensor


@on_ranks(2)
def test_sums_of_rows_by_other_numbers_are_refused():
    with pytest.raises(GradientError, match="__getitem__ was asked of a gradient along dimension 0"):
        of_rows(ByOthersRows, tulle.init(data=-1))
