"""In forward a split table has the shape of the whole, also on the stages of a pipeline."""

import copy

import pytest
import torch
from axes_models import worst_difference
from torch import nn

import tulle
from ranks import on_ranks

ROWS, WIDTH = 42, 6


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input % len(self.weight)) * self.weight.shape[1] ** 0.5


class Hashing(nn.Module):
    """Goes by how many rows its table has, between modules and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.out = Scaled(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(5 * ids % self.table.weight.shape[0] + ROWS)
        return self.out(self.hidden(found).tanh()).pow(2).mean()


class Interrupted(Hashing):
    """Is interrupted, as by Ctrl-C, within a module of its."""

    is_interrupted = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return super().forward(ids)


@on_ranks(2)
def test_a_forward_that_was_interrupted_is_over():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = Interrupted().double()
    plan = tulle.Plan(mesh.shape).with_rows_split({"table.weight": (ROWS, WIDTH)}, "as the test wants it")
    model, _ = tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.5), mesh, plan=plan)
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(8))
    assert model.table.weight.to_local().shape == (ROWS // mesh.size, WIDTH)
    whole = tulle.full_state_dict(model)
    model.load_state_dict(model.state_dict())
    model.is_interrupted = False
    model(torch.arange(8)).backward()
    assert mesh.rank or whole["table.weight"].shape == (ROWS, WIDTH)


@on_ranks(4)
def test_a_split_table_on_a_stage_has_the_shape_of_the_whole_in_forward():
    mesh = tulle.init(data=2, pipe=2)
    torch.manual_seed(0)
    reference = Hashing().double()
    model = copy.deepcopy(reference)
    theirs, ours = (torch.optim.SGD(one.parameters(), 0.5) for one in (reference, model))
    stages = tulle.Plan(mesh.shape, stages={"table": 0, "hidden": 0, "out": 1})
    plan = stages.with_rows_split({"table.weight": (ROWS, WIDTH)}, "as the test wants it")
    model, ours = tulle.distribute(model, ours, mesh, plan=plan)

    @tulle.step(micro_batches=2)
    def step(model, ids):
        loss = model(ids)
        loss.backward()
        return loss

    for ids in torch.arange(96).view(4, 8, 3):
        reference(ids).backward()
        step(model, ids.chunk(2)[mesh["data"].rank])
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    whole = tulle.full_state_dict(model)
    assert mesh.rank or worst_difference(whole, reference.state_dict()) < 1e-12
