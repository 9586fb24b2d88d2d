"""Twins of the checks of exactness: with a part of the run-time taken out, they must go red."""

import pytest
import torch
from pipeline_networks import TiedEnds, compare, make, spread

import tulle
from ranks import on_ranks
from tulle.pipeline.tape import Tape
from tulle.pipeline.tied import Aside


@on_ranks(2)
def test_gradients_of_tied_parameters_that_are_not_summed_are_noticed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Aside, "add_up", lambda *_: None)
        assert compare(TiedEnds, tulle.init(pipe=-1), spread(make(TiedEnds), 2)) > 1e-3


@on_ranks(2)
def test_phases_that_are_not_cut_are_noticed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "cut", lambda _, value, *__, **___: value.detach())
        mesh = tulle.init(pipe=-1)
        difference = compare(Crossing, mesh, {"first": 0, "second": 1, "third": 0})
        assert mesh.rank == 1 or difference > 1e-3


class Crossing(torch.nn.Module):
    """Reads on rank 0, after rank 1 had its turn, what rank 0 made before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Bilinear(6, 6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.third(self.second(y).tanh(), y)


@on_ranks(2)
def test_the_network_of_the_twin_is_right_without_it():
    assert compare(Crossing, tulle.init(pipe=-1), {"first": 0, "second": 1, "third": 0}) < 1e-14
