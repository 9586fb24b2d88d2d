"""No hang: what cannot work is refused by name, and what fails on one rank ends the step on all."""

import copy
import re
import time
import warnings

import pytest
import torch
from pipeline_networks import WIDTH, Chain, batches, make, spread, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, DataError, ModelError, PlanError
from tulle.pipeline import placement_of


class Breaks(Chain):
    """One of its modules fails on what it is told to."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[2] = FailsOnLarge(WIDTH, WIDTH)


class FailsOnLarge(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            raise ValueError("too large")
        return super().forward(x)


def two(kind):
    mesh = tulle.init(pipe=-1)
    model = make(kind)
    pipeline.place(model, mesh["pipe"], spread(model, mesh.size))
    return mesh, model


@on_ranks(2, 3)
def test_an_error_in_a_module_reaches_all_ranks_at_once_and_training_can_go_on():
    mesh, model = two(Breaks)
    with torch.no_grad():
        model.layers[1].weight.mul_(1)
    step = pipeline.step(micro_batches=2)(scaled)
    good = torch.ones(4, WIDTH, dtype=torch.float64)
    step(model, good, 1.0)
    owner = placement_of(model).stages["layers.2"]
    begin_s = time.monotonic()
    expected = ValueError if mesh.rank == owner else CommunicationError
    with pytest.raises(expected, match="too large") as caught:
        step(model, good, 1000.0)
    assert time.monotonic() - begin_s < 10
    if mesh.rank == owner:
        # whichever micro-batch came first
        assert re.search("in module 'layers.2', micro-batch [01] of step", caught.value.__notes__[0])
    else:
        assert f"rank {owner} failed with ValueError" in str(caught.value)
    assert torch.isfinite(step(model, good, 1.0).mean())


def scaled(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    return train_on(lambda y: model.layers[3](model.layers[2](model.layers[1](model.layers[0](y)) * scale)), x)


def train_on(model, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


class Hides(nn.Module):
    """Hands a tensor to a module past its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Remembers()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.second.hidden.append(y)
        return self.second(torch.ones_like(x))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.hidden.pop())


class Fickle(nn.Module):
    """Gives a tensor of as many rows as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Picks()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: 1 + int(x[0, 0] > 0)]


class Overwrites(nn.Module):
    """Writes what a later stage gives in a part of a tensor, which it takes before that comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        both = y.new_zeros(2, *y.shape)
        both[0] = y
        both[1].copy_(self.second(y))
        return both.sum(0)


class Borrows(nn.Module):
    """The second module multiplies with the weight of the first, which it has past its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Reads(WIDTH, WIDTH)
        self.second.of = [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x), self.of[0].weight)


class Follows(nn.Module):
    """A weight that both stages hold is written in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.mul_(x.mean())
        return self.second(self.first(x))


@on_ranks(2)
def test_parameters_of_which_a_stage_has_no_values_or_one_of_several_copies_are_refused():
    x = batches(1, 2)[0]
    _, model = two(Borrows)
    for call in (lambda: model(x), lambda: pipeline.step(micro_batches=1)(train)(model, x)):
        match = "operation 'linear' in 'second' reads a parameter.* lives at stage 0"
        with torch.no_grad(), pytest.raises((ModelError, CommunicationError), match=match):
            call()
    _, model = two(Follows)
    with pytest.raises(ModelError, match=r"'mul_' writes in 'first\.weight', of which several ranks hold a copy"):
        pipeline.step(micro_batches=1)(train)(model, x)


@on_ranks(2)
def test_what_looks_at_all_parameters_says_that_a_rank_has_some():
    _, model = two(Chain)
    reference, x = make(Chain), batches(1, 2)[0]
    pipeline.step(micro_batches=1)(train)(model, x)
    train(reference, x)
    norm = tulle.clip_grad_norm_(model, 0.1)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item())
    with pytest.raises(ModelError, match=r"LBFGS (looks at all parameters at once|does not treat every element)"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    with pytest.raises(tulle.TulleError, match=r"placed by pipeline\.place alone"):
        tulle.full_state_dict(model)


@on_ranks(2)
def test_what_cannot_work_is_refused_by_module_and_operation():
    _, model = two(Hides)
    match = "operation 'add' in 'second' reads Placeholder|failed with ModelError"
    with pytest.raises((ModelError, CommunicationError), match=match):
        pipeline.step(micro_batches=1)(train)(model, batches(1, 2)[0])
    _, model = two(Overwrites)
    match = "operation 'copy_' writes in Placeholder.*, of which there are views|failed with ModelError"
    with pytest.raises((ModelError, CommunicationError), match=match):
        pipeline.step(micro_batches=1)(train)(model, batches(1, 2)[0])
    _, model = two(Fickle)
    with torch.no_grad():
        for parameter in model.first.parameters():
            if not parameter.is_meta:
                parameter.fill_(1.0)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    match = "its outcome depends on values; if it is a module, place its submodules|failed with ModelError"
    with pytest.raises((ModelError, CommunicationError), match=match):
        pipeline.step(micro_batches=2)(train)(model, torch.cat([x, -x]))
    _, model = two(Chain)
    for refused, match in (
        (lambda y: y.sum().backward(create_graph=True), "create_graph"),
        (lambda y: y.backward(), r"shape \[2, 6\]"),
        (lambda y: y.detach().sum().backward(), "needs no gradient"),
        (lambda y: y.register_hook(print), r"register_hook\(\)"),
        (lambda y: setattr(y, "data", y), r"setting .data"),
        (
            lambda y: torch.as_tensor(y, dtype=torch.int),
            r"past torch's modes. A constructor does so .* write x.detach\(\).clone\(\)",
        ),
    ):
        y = model(x)
        with pytest.raises(ModelError, match=match):
            refused(y)


HOOKED = {
    "parameter": lambda model, _: next(model.parameters()).register_hook(print),
    "gradient": lambda model, _: next(model.parameters()).register_post_accumulate_grad_hook(print),
    "own": lambda _, x: x.clone().requires_grad_().register_hook(print),
}


@on_ranks(2)
@pytest.mark.parametrize("what", HOOKED)
def test_hooks_of_gradients_that_a_step_puts_on_are_refused_on_all_ranks(what):
    def hooking(model, x):
        HOOKED[what](model, x)
        return train(model, x)

    _, model = two(Chain)
    with pytest.raises(ModelError, match=r"_hook\(\) was called between modules .* Put hooks on parameters before"):
        pipeline.step(micro_batches=2)(hooking)(model, batches(1, 4)[0])


@on_ranks(2)
def test_a_value_asked_for_on_some_ranks_only_runs_into_the_time_out():
    mesh = tulle.init(pipe=-1, timeout=3.0)
    model = make(Chain)
    axis = tulle.mesh.axis_of(mesh["pipe"].group, name="pipe")
    axis = type(axis)(
        **{
            **{name: getattr(axis, name) for name in ("name", "rank", "size", "ranks", "group", "device")},
            "timeout_s": 3.0,
        }
    )
    pipeline.place(model, axis, spread(model, 2))
    loss = model(batches(1, 2)[0]).sum()
    if mesh.rank == 0:
        with pytest.raises(CommunicationError, match=r"the outcome of 'item'.* nothing came within 3 s"):
            loss.item()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_bad_arguments_are_refused_on_every_rank():
    mesh = tulle.init(pipe=-1)
    model = make(Chain)
    for assignment, match in (
        ({"layers.9": 0}, "'layers.9', which is not a module"),
        ({"layers.0": -1}, "stage -1"),
        ({"": 0, "layers.0": 1}, "which is around it"),
        ({"layers.0": mesh.rank}, "give all the same"),
        (["layers.0"], r"the assignment is \['layers.0'\], expected the stages of modules by name"),
    ):
        with pytest.raises(PlanError, match=match):
            pipeline.place(model, mesh["pipe"], assignment)
    with pytest.raises(PlanError, match="neither an assignment"):
        pipeline.place(model, mesh["pipe"])
    with pytest.raises(ModelError, match="'0' is a ScriptModule"):
        pipeline.place(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), mesh["pipe"], {"0": 0})
    lazy, text = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)), "'0.weight' has no shape yet .* call the model once"
    for options in ({"assignment": {"0": 0, "1": 1}}, {"sample": torch.ones(2, 2)}):
        with pytest.raises(ModelError, match=text):
            pipeline.place(lazy, mesh["pipe"], **options)
    graph = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that CSR is new
        graph.register_buffer("edges", torch.eye(2).to_sparse_csr())
    with pytest.raises(ModelError, match=r"'edges' is torch.sparse_csr .* do not travel between stages"):
        pipeline.place(graph, mesh["pipe"], {"0": 0, "1": 1})
    pipeline.place(model, mesh["pipe"], spread(model, 2))
    with pytest.raises(ModelError, match="placed before"):
        pipeline.place(model, mesh["pipe"], {"layers.0": 0})
    x = torch.zeros(3, WIDTH, dtype=torch.float64)
    for options, arguments, match in (
        ({"micro_batches": 4}, (x,), "3 samples cannot be cut into 4"),
        ({"micro_batches": 2, "split": {"y": 0}}, (x,), r"\['y'\]"),
        ({"micro_batches": 2, "split": {"x": 2}}, (x,), "along dimension 2"),
        ({"micro_batches": 2}, ((x, x[:2]),), "different numbers of samples"),
        ({"micro_batches": 2}, (x.to_sparse(),), r"'x' .* layout torch.sparse_coo, .* say split=\{name: None\}"),
        (
            {"micro_batches": 2},
            (torch.nested.nested_tensor([x, x], layout=torch.jagged),),
            "'x' is or holds a nested tensor",
        ),
    ):
        with pytest.raises(DataError, match=match):
            pipeline.step(**options)(train)(model, *arguments)
    with pytest.raises(PlanError, match="expected a positive number"):
        pipeline.step(micro_batches=0)
    with pytest.raises(PlanError, match="step was given 4, expected the step function, or micro_batches=4"):
        pipeline.step(4)
    with pytest.raises(PlanError, match="use one of 'gpipe', '1f1b', 'eager-1f1b', 'zb-h1'"):
        pipeline.step(micro_batches=1, schedule="zero bubble")


class Converts(Chain):
    """Makes one of its layers another dtype's, as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[1].to(x.dtype).to(torch.float32)
        return super().forward(x)


@on_ranks(2)
def test_a_forward_that_changes_the_dtype_of_a_parameter_is_refused():
    _, model = two(Converts)
    with pytest.raises(tulle.TulleError, match=r"makes a parameter of torch\.float64 one of torch\.float32"):
        pipeline.step(micro_batches=1)(train_on)(model, torch.ones(2, WIDTH, dtype=torch.float64))


@on_ranks(2)
def test_a_copy_and_a_model_compiled_as_a_whole_say_that_nothing_places_their_calls():
    mesh, model = two(Chain)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    expected = model(x).sum().item()
    average = AveragedModel(model)
    average.update_parameters(model)
    alone = copy.deepcopy(model)
    for call in (alone, average, pipeline.step(micro_batches=2)(lambda batch: alone(batch))):
        with pytest.raises(ModelError, match=r"a Chain was called of which other ranks have parameters, and nothing"):
            call(x)
    pipeline.place(alone, mesh["pipe"], spread(model, mesh.size))
    assert alone(x).sum().item() == expected
    model.compile(backend="eager")
    with pytest.raises(ModelError, match=r"model.compile\(\) of the whole model undoes that \(compile modules within"):
        model(x)


class Collects(Chain):
    """Adds up what hooks have seen that are put on modules within others after these were placed."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) + sum(one.mean() for one in self.seen)


@on_ranks(2)
def test_what_a_hook_within_a_placed_module_has_left_is_refused_where_it_is_read():
    _, model = two(Collects)
    step = pipeline.step(micro_batches=2)(train)
    step(model, batches(1, 4)[0])
    for layer in model.layers:
        layer[0].register_forward_hook(lambda _, args, result: model.seen.append(result.detach()))
    with pytest.raises(tulle.TulleError, match=r"within it \('layers\.\d\.0'\): other ranks do not have it"):
        step(model, batches(1, 4)[0])


@on_ranks(2)
def test_hooks_of_which_one_would_not_see_what_another_changes_are_refused():
    _, model = two(Chain)
    model.layers[1].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
    handle = model.layers[1].register_forward_hook(lambda _, given, result: result + given[0])
    with pytest.raises(tulle.TulleError, match=r"'layers\.1' has a forward hook that changes what it gives"):
        pipeline.step(micro_batches=1)(train_on)(model, torch.ones(2, WIDTH, dtype=torch.float64))
    handle.remove()
    pipeline.step(micro_batches=1)(train_on)(model, torch.ones(2, WIDTH, dtype=torch.float64))


@on_ranks(2)
def test_hooks_of_backward_around_placed_modules_are_refused():
    _, model = two(Chain)
    model.register_full_backward_hook(lambda _, before, after: None)
    with pytest.raises(tulle.TulleError, match=r"a hook of backward .* has placed modules within"):
        pipeline.step(micro_batches=1)(train_on)(model, torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True))


def test_a_number_of_what_a_step_returns_is_asked_for_by_name():
    with pytest.raises(DataError, match=r"write \.mean\(\)\.item\(\)"):
        float(pipeline.StepOutput([torch.tensor(1.0)], [1.0]))


def test_numbers_that_a_step_returns_keep_their_digits():
    losses = pipeline.StepOutput([0.1, 0.2], [0.5, 0.5])
    assert losses.mean().item() == 0.1 * 0.5 + 0.2 * 0.5
    assert losses.stack().tolist() == [0.1, 0.2]
    assert pipeline.StepOutput([2, 3], [0.5, 0.5]).sum().item() == 5
