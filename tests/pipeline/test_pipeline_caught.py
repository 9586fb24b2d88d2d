"""What code between modules may catch, and what it must not make of what a stage gives: told by name, on all ranks."""

import time
from collections.abc import Iterator

import pytest
import torch
from beside_one_process import DTYPE, both, data, loss_of
from pipeline_networks import WIDTH, make
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, ModelError


class Picky(nn.Linear):
    """Fails on what is too large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            raise ValueError("too large")
        return super().forward(x)


class Retries(nn.Module):
    """Code between modules tries what fails, and then something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Picky(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            x = x @ torch.ones(WIDTH + 1, 2, dtype=x.dtype)
        except RuntimeError:
            x = 2 * x
        try:
            return self.second(x)
        except ValueError:
            return x


RETRIES = {"first": 0, "second": 1}


@on_ranks(2)
def test_code_between_modules_catches_what_an_operation_raises_on_all_ranks():
    worst, model, reference = both(Retries, RETRIES)
    assert worst < 1e-12
    with torch.no_grad():
        assert model(data()).sum().item() == pytest.approx(reference(data()).sum().item())
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        pipeline.step(micro_batches=2)(lambda model, x: model(x) @ torch.ones(WIDTH + 1, 2, dtype=DTYPE))(model, data())
    assert "on rank 1 of axis 'pipe'" in caught.value.__notes__[0]


@on_ranks(2)
def test_a_step_that_goes_on_behind_the_error_of_a_module_is_refused_at_once():
    mesh = tulle.init(pipe=-1)
    model = pipeline.place(make(Retries), mesh["pipe"], RETRIES)
    begin_s = time.monotonic()
    with pytest.raises((ModelError, CommunicationError), match=r"a placed module raised ValueError\('too large'\)"):
        pipeline.step(micro_batches=2)(loss_of)(model, 1000 * data())
    assert time.monotonic() - begin_s < 10
    assert pipeline.step(micro_batches=2)(loss_of)(model, data()).mean() > 0


class Late(nn.Module):
    """Makes a parameter of what a stage gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.scale = nn.Parameter(x.detach().std(0))
        return self.second(x / self.scale)


class Packs(nn.Linear):
    """Gives a nested tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)


class Unpacks(nn.Module):
    """Hands a nested tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Packs(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Yields(nn.Linear):
    """Gives its rows one by one."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield from super().forward(x)


class Stacks(nn.Module):
    """Stacks what a generator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Yields(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.stack(list(self.first(x))))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Late, r"^nn.Parameter was made of Placeholder\(stage=0, shape=\[6\]"),
        (Stacks, "'first' gives an iterator, as what has yield in it does"),
        (Unpacks, r"a nested tensor .* goes to 'first', or comes from it"),
    ],
)
def test_parameters_of_what_a_stage_gives_generators_and_nested_tensors_are_refused(kind, match):
    model = pipeline.place(make(kind), tulle.init(pipe=-1)["pipe"], {"first": 0, "second": 1})
    with pytest.raises(ModelError if kind is Late else (ModelError, CommunicationError), match=match):
        pipeline.step(micro_batches=2)(loss_of)(model, data())


@on_ranks(2)
def test_a_step_within_a_step_is_refused_on_all_ranks():
    model = pipeline.place(make(Retries), tulle.init(pipe=-1)["pipe"], RETRIES)
    step = pipeline.step(micro_batches=2)(loss_of)
    with pytest.raises(ModelError, match=r"a function of tulle\.step was called within another one"):
        pipeline.step(micro_batches=2)(lambda model, x: step(model, x).mean())(model, data())
    assert step(model, data()).mean() > 0


@on_ranks(2)
def test_what_a_stage_refuses_to_do_outside_of_steps_is_refused_on_all_ranks_at_once():
    model = pipeline.place(make(Retries), tulle.init(pipe=-1, timeout=8)["pipe"], RETRIES)
    first, second = model.first(data()), model.second(data())
    begin_s = time.monotonic()
    both, copy = first + second, first.clone()
    with pytest.raises(ModelError, match=r"'add_' writes in Placeholder.* of which there are views"):
        copy[:, 0].add_(second[:, 1])  # which comes after something was sent, as one rank alone sees
    assert both.shape == copy.shape
    assert time.monotonic() - begin_s < 4
    assert first.sum().item() == pytest.approx(model.first(data()).sum().item())
