"""An optimizer of the user's own, said to treat every number by itself, steps parts as it would step wholes."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError, PlanError
from tulle.memory import register_elementwise
from tulle.plan import Memory, Plan


class Lion(torch.optim.Optimizer):
    """Chen et al. (2023), with a rate that grows by a count in the group, as schedule-free optimizers keep one."""

    def __init__(self, parameters, lr=0.01) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                update = (0.9 * average + 0.1 * parameter.grad).sign()
                parameter.add_(update, alpha=-group["lr"] * min(1.0, group["k"] / 3))
                average.lerp_(parameter.grad, 0.01)
        return loss


@register_elementwise
class Registered(Lion):
    """The same, of which it was said."""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)
        self.network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.network(self.words(ids)).pow(2).mean()


PLANS = {
    "full_shard": {"memory": Memory(full_shard=True)},
    "shard_optimizer": {"memory": Memory(shard_optimizer=True)},
    "rows": {"words.weight": "rows"},
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, place: int = 0, places: int = 1) -> None:
    for step in range(6):
        ids = torch.arange(12 * step, 12 * step + 12).remainder(13)
        model(ids.chunk(places)[place]).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("how", PLANS)
def test_it_gives_the_numbers_of_one_process(how):
    torch.manual_seed(0)
    mesh, model = tulle.init(data=-1), Words().double()
    reference = copy.deepcopy(model)
    train(reference, Registered(reference.parameters()))
    plan = Plan(mesh.shape, **PLANS[how]) if "memory" in PLANS[how] else PLANS[how]
    model, optimizer = tulle.distribute(model, Registered(model.parameters()), mesh, plan=plan)
    train(model, optimizer, mesh.rank, mesh.size)
    found = tulle.full_state_dict(model, everywhere=True)
    for name, wanted in reference.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-12)


@on_ranks(2)
def test_of_which_it_was_not_said_is_refused_with_the_way_to_say_it():
    mesh, model = tulle.init(data=-1), Words()
    with pytest.raises(
        PlanError, match=r"Lion is not known to .*, or say that it does by tulle\.memory\.register_elem"
    ):
        tulle.distribute(model, Lion(model.parameters()), mesh, plan=Plan(mesh.shape, **PLANS["shard_optimizer"]))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("how", ["full_shard", "shard_optimizer"])
def test_what_of_torchs_looks_at_wholes_is_refused_and_may_not_be_registered(kind, how):
    model = nn.Linear(4, 4)
    plan = Plan({"data": 1}, memory=Memory(**{how: True}))
    with pytest.raises(PlanError, match=f"{kind.__name__} looks at whole parameters, .*: use one of [^:]*Rprop$"):
        tulle.distribute(model, kind(model.parameters()), tulle.init(data=-1), plan=plan)
    with pytest.raises(ModelError, match=rf"was given torch\.optim\.{kind.__name__}, which looks at whole"):
        register_elementwise(kind)
