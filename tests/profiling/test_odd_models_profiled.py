"""Models and optimizers that are made in a way of their own are profiled like others."""

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tulle
from tulle.errors import MeshError, ModelError
from tulle.memory.estimate import default_loss
from tulle.pipeline.calls import watch
from tulle.pipeline.profile import profile as profile_pieces
from tulle.placing import placements_of, tables_of
from tulle.plan import Plan, footprints
from tulle.profiling import measure, rows_touched, timing, trained_tables
from tulle.profiling.optimizer import tried
from tulle.profiling.samples import halved, samples_in
from tulle.profiling.splits import splits
from tulle.profiling.steps import Twin
from tulle.workload import Profile


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The run-time's own time is of the machine: models of its own, with which no model here has to do, tell it."""
    monkeypatch.setattr(timing, "BUDGET_S", 0.02)
    monkeypatch.setattr(measure, "with_run_time", lambda machine, _axis: machine)


class Scaled(torch.optim.Optimizer):
    """Keeps a number of its own, which `torch.optim.Optimizer` leaves out of copies."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = 2.0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-self.scale * group["lr"])


class Auxiliary(nn.Module):
    """Keeps a loss of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.body(x).pow(2).mean()
        return self.auxiliary


class Collects(nn.Module):
    """Hooks its table when it is first called, as `transformers` does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.seen = nn.Embedding(9, 4, sparse=True), []
        self.is_hooked = False

    def forward(self, ids: Tensor) -> Tensor:
        if not self.is_hooked:
            self.words.register_forward_hook(lambda _, args, out: self.seen.append(out))
            self.is_hooked = True
        return self.words(ids).sum()


def test_a_look_at_lookups_leaves_no_hooks_that_a_forward_has_put_on_modules():
    model = Collects()
    assert rows_touched(model, torch.tensor([3, 1, 3]))["words.weight"].tolist() == [1, 3]
    assert (len(model.words._forward_hooks), model.is_hooked, model.seen) == (0, False, [])
    model(torch.tensor([2]))
    assert len(model.seen) == 1


def twin_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Twin:
    return Twin.of(model, [optimizer], [torch.randn(3, 4)], default_loss)


def test_an_optimizers_own_attributes_are_copied():
    model = nn.Linear(4, 4)
    optimizer = Scaled(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # wraps its step, for this optimizer
    before = model.weight.detach().clone()
    twin = twin_of(model, optimizer)
    twin.step(twin.samples[0])
    assert twin.optimizers[0].scale == 2.0
    assert torch.equal(model.weight, before)


def test_what_a_forward_has_kept_is_copied_without_how_it_was_computed():
    model = Auxiliary()
    model(torch.ones(2, 4))
    twin = twin_of(model, torch.optim.SGD(model.parameters(), 0.1))
    assert torch.equal(twin.model.auxiliary, model.auxiliary)
    assert model.auxiliary.grad_fn is not None
    assert twin.model.auxiliary.grad_fn is None


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_copy_steps_by_nothing_so_that_it_does_not_run_off(rate):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    twin = twin_of(model, optimizer)
    for _ in range(3):
        twin.step(twin.samples[0])
    assert torch.equal(twin.model.weight, model.weight)
    assert twin.optimizers[0].state[twin.model.weight]["exp_avg"].abs().sum() > 0
    assert optimizer.param_groups[0]["lr"] == rate


class Drawing(nn.Module):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (random.random() + np.random.rand() + torch.rand(()))


def test_numpys_random_state_is_as_before():
    model = Drawing()
    np.random.seed(3)
    tulle.profile(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4))
    drawn = np.random.rand()
    np.random.seed(3)
    assert drawn == np.random.rand()


def parametrized() -> nn.Module:
    return parametrizations.spectral_norm(nn.Embedding(20, 4))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Embedding(20, 4), "weight", 0.5)


def buffered() -> nn.Module:
    table = nn.Embedding(20, 4)
    weight = table.weight.detach()
    del table.weight
    table.register_buffer("weight", weight)
    return table


@pytest.mark.parametrize("made", [parametrized, pruned, buffered])
def test_a_weight_that_is_no_parameter_is_no_table(made):
    model = nn.Sequential(made(), nn.Linear(4, 1))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert tables_of(model) == trained_tables(model) == {}
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers()), "nothing was computed"
    assert placements_of(model, [torch.optim.SGD(model.parameters(), 0.1)], ranks=2) == {}
    assert rows_touched(model, torch.tensor([1, 2])) == {}
    assert splits(model, ["0", "1"], {}, {}) == {}


def test_what_a_hook_has_kept_in_a_dictionary_of_the_model_does_not_end_a_profile():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.kept = {"features": [], "of": {}}
    model[0].register_forward_hook(lambda module, given, result: model.kept["features"].append(result))
    model(torch.ones(2, 4))
    assert splits(model, ["0", "1"], {}, {}, ranks=2).keys() == {"0"}


def test_a_batch_of_a_tokenizers_class_is_a_batch():
    sample = UserDict(ids=torch.zeros(8, 3), mask=torch.ones(8), scale=2.0)
    assert samples_in(sample) == 8
    half, share = halved(sample)
    assert share == 0.5
    assert [len(half["ids"]), len(half["mask"]), half["scale"]] == [4, 4, 2.0]


class Convolution(nn.Module):
    """Features of a graph's nodes, each the sum of its neighbours'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.graph, self.outer = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1)

    def forward(self, features, graph):
        return self.outer(torch.sparse.mm(self.graph(graph), self.inner(features).relu())).mean()


def test_a_graph_as_a_sparse_tensor_is_profiled_whole():
    model, sample = Convolution(), (torch.ones(6, 4), torch.eye(6).to_sparse())
    assert halved(sample) == (sample, 1.0)
    found = tulle.profile(model, torch.optim.SGD(model.parameters(), 0.1), sample)
    assert {"inner", "outer"} <= {piece.name for piece in found.modules}
    assert not found.is_divisible


class Edges(nn.Module):
    """Features of a graph's nodes, each the sum of its neighbours', by the nodes' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, features, sources, targets):
        return torch.zeros_like(features).index_add(0, targets, self.inner(features)[sources].expand(-1, 4)).mean()


@pytest.mark.parametrize(("nodes", "is_divisible"), [(6, False), (1, True)])
def test_half_of_a_graph_is_no_sample(nodes, is_divisible):
    model, numbers = Edges(), torch.arange(nodes).repeat(2)
    sample = (torch.ones(nodes, 4), numbers, numbers.flip(0))
    found = tulle.profile(model, torch.optim.SGD(model.parameters(), 0.1), sample)
    assert (found.is_divisible, found.fixed_share) == (is_divisible, 0.0), "of one node half is not asked for"
    assert Profile.from_json(found.to_json()).is_divisible == is_divisible


def test_frozen_parameters_are_held_by_every_micro_batch_and_a_step_needs_what_it_was_seen_to():
    body, table = nn.Linear(256, 256), nn.Embedding(2000, 32)
    model = nn.Sequential(table, nn.Linear(32, 256), body, nn.Linear(256, 2))
    body.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = tulle.profile(model, torch.optim.Adam(trained), torch.randint(0, 2000, (8,)))
    assert sum(piece.frozen_bytes for piece in found.modules) == 4 * (256 * 256 + 256)
    one, parts = (footprints(Plan({"data": 1}, micro_batches=n), found, found.cluster)[0] for n in (1, 8))
    assert one.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert parts.parameters_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_a_sparse_optimizer_of_a_model_without_memory_is_tried_with_sparse_gradients():
    with tulle.deferred_init():
        model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 1))
    optimizers = [torch.optim.SparseAdam([model[0].weight]), torch.optim.Adam(model[1].parameters())]
    assert tried(optimizers, torch.device("cpu")).state_share == pytest.approx(2.0)


class Switches(nn.Module):
    """Takes another layer the first time that it is called, as BigBird does for short texts."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.body, nn.Sequential):
            self.body = self.body[0]
        return self.body(x)


def test_a_forward_that_puts_other_modules_in_is_refused_until_it_has():
    model, sample = Switches(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"\('body' was Sequential and is Linear afterwards\), .* call the model once"):
        tulle.profile(model, optimizer, sample)
    model(sample)
    assert [module.name for module in tulle.profile(model, optimizer, sample).modules] == ["body"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_torchscript_calls_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"'1' is a ScriptModule, .* give the module as it was before"):
        tulle.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))


@pytest.mark.parametrize("made", [torch.compile, nn.Module.compile])
def test_what_is_within_a_compiled_module_is_not_taken_apart(made):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    compiled = made(inner, backend="eager", fullgraph=True) or inner
    calls = watch(nn.Sequential(nn.Linear(4, 4), compiled), (torch.ones(2, 4),), {})
    assert list(calls.chains) == ["", "0", "1"]


def test_a_model_whose_copy_runs_its_own_forward_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for layer in model:
        layer.forward = lambda x, old=layer.forward: 2 * old(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tulle.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4))
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []


class Expert(nn.Module):
    """Keeps a loss of its own, which the model adds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.loss = nn.Linear(4, 4), nn.Linear(4, 1), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.loss = self.gate(y).pow(2).mean()
        return y


def test_what_keeps_a_loss_is_not_placed_whole():
    model, mesh = nn.Sequential(Expert(), nn.Linear(4, 4)), tulle.init(data=1)
    pieces, _ = profile_pieces(model, torch.ones(2, 4), mesh["data"], 2)
    assert [piece.name for piece in pieces] == ["0.body", "0.gate", "1"]


class Forces(nn.Module):
    """The gradients of an energy by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.body = nn.Embedding(9, 4), nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.body(torch.cat([self.kinds(kinds), positions], dim=-1)).sum()
        return torch.autograd.grad(energy, positions, create_graph=True)[0]


class Residual(nn.Module):
    """How far a network is from solving u' = u."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.body(x)
        return (torch.autograd.grad(u.sum(), x, create_graph=True)[0] - u).pow(2).mean()


class ScaledForces(nn.Module):
    """Forces of a module within, times what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.forces, self.scale = Forces(), nn.Linear(3, 3)

    def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
        return self.scale(self.forces(kinds, positions)).pow(2).sum()


class Hooked(nn.Module):
    """Hooks the gradient of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return self.head(hidden)


@pytest.mark.parametrize(
    ("made", "sample", "pieces", "tokens"),
    [
        (Residual, torch.ones(3, 1), [""], []),
        (ScaledForces, (torch.tensor([1, 2, 2]), torch.ones(3, 3)), ["forces", "scale"], [3.0]),
    ],
)
def test_a_forward_that_needs_gradients_is_profiled_and_what_asks_for_them_is_not_cut(made, sample, pieces, tokens):
    model = made()
    found = tulle.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), sample)
    assert [module.name for module in found.modules] == pieces
    assert [table.tokens for table in found.tables] == tokens
    with tulle.deferred_init():
        model = made()
    found, _ = profile_pieces(model, sample, tulle.init(data=1)["data"], 2)
    assert [piece.name for piece in found] == pieces


def test_lookups_of_a_forward_that_hooks_gradients_are_seen():
    assert rows_touched(Hooked(), torch.ones(2, 4)) == {}


def test_arguments_of_other_kinds_and_samples_that_the_model_does_not_take_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    optimizer, sample, mesh = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor([1]), tulle.init(data=1)
    bare = "a Sequential could not be profiled on the sample, a str without a tensor, because "
    refusals = {
        bare: (model, optimizer, "abc"),
        "given a SGD as model, expected a torch.nn.Module": (optimizer, model, sample),
        "given a generator as optimizer, expected": (model, model.parameters(), sample),
        "given a int as optimizer, expected": (model, [optimizer, 3], sample),
        "given a dict as mesh, expected what tulle.init returns": (model, optimizer, sample, {"data": 1}),
    }
    for text, arguments in refusals.items():
        with pytest.raises((MeshError, ModelError), match=text):
            tulle.profile(*arguments)
    with pytest.raises(ModelError, match="given loss='mean', expected a function"):
        tulle.profile(model, optimizer, sample, loss="mean")
    with pytest.raises(ModelError, match=bare):
        tulle.plan(model, optimizer, mesh, sample="abc")
