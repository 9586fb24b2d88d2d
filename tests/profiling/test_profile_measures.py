"""A profile says what a training step does, and leaves what it measured as it was."""

import random
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tulle
from gigabit import give_network
from rank_process import patches
from ranks import on_ranks
from tulle.comm import traffic
from tulle.cost import Network
from tulle.errors import ModelError, PlanError
from tulle.plan import Plan
from tulle.plan.lower import lower
from tulle.profiling import machine, measure, timing
from tulle.profiling.splits import splits
from tulle.workload import Machine, Profile, Split

ROWS, WIDTH = 50, 8


class Words(nn.Module):
    """A sparse table that is read past its module too, batch norm, dropout and a layer that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        state = self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2)
        extra = functional.embedding(torch.tensor([ROWS - 1]), self.words.weight, sparse=True)
        return self.head(self.body(state) + extra).pow(2).mean()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "BUDGET_S", 0.02)


def made() -> tuple[Words, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Words()
    others = [parameter for name, parameter in model.named_parameters() if name != "words.weight"]
    return model, [torch.optim.Adam(others), torch.optim.SparseAdam([model.words.weight])]


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows).view(1, -1)


def test_a_profile_has_pieces_tables_and_the_optimizer():
    model, optimizers = made()
    found = tulle.profile(model, optimizers, ids(3, 1, 3, 7), further=[ids(2, 2, 2, 2)])
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert [module.name for module in found.modules][:2] == ["words", "norm"]
    assert sum(module.parameters_bytes for module in found.modules) == parameters_bytes - ROWS * WIDTH * 4
    assert found.modules[-1].reads
    assert found.modules[-1].flop == 2 * 4 * WIDTH * 4  # tokens x width x 4 outputs
    assert found.peak_bytes > 3 * parameters_bytes  # the optimizers' state
    assert found.optimizer.state_share == pytest.approx(2.0)
    assert not found.optimizer.updates_all_rows
    assert found.batch == 1
    (table,) = found.tables
    assert (table.name, table.rows, table.width, table.module) == ("words.weight", ROWS, WIDTH, "words")
    assert [[rows.tolist() for rows in step] for step in table.stream] == [[[1, 3, 7, 49]], [[2, 49]]]
    assert table.tokens == 5


def test_what_the_run_time_of_a_pipeline_takes_is_measured_and_kept(tmp_path):
    model, optimizers = made()
    tulle.profile(model, optimizers, ids(3, 1, 3, 7)).save(tmp_path / "profile.json")
    found = Profile.load(tmp_path / "profile.json")
    assert 1e-6 < found.cluster.machine.call_s < 1e-1
    assert 0 <= found.cluster.machine.operation_s < 1e-1
    assert 0 <= found.cluster.machine.micro_batch_s < 1e-1
    # Two times transposed, added to, a square and its mean; that of the words alone waits for no module.
    assert found.between[""] == 5
    assert found.between.keys() <= {"", "body"}
    assert found.modules[-1].name == "head"
    assert {module.around for module in found.modules if module.name.startswith("body.")} <= {("", "body")}
    assert 0 <= found.optimizer.fixed_share <= 1


def test_what_adds_up_the_rows_of_a_gradient_is_not_taken_for_the_optimizers():
    """The twin looks each row up once: its gradients need not be added up, and its update is the same."""
    rows_s: list[float] = []
    for repeats in (1, 30):
        model = nn.Sequential(nn.EmbeddingBag(5000, 32, sparse=True), nn.Linear(32, 1))
        optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
        found = tulle.profile(model, optimizers, torch.arange(2000).repeat(repeats).view(-1, 10))
        rows_s.append(found.optimizer.row_s_per_byte)
    assert rows_s[1] < 4 * rows_s[0]  # nine times, were it so


def test_the_momentum_of_sparse_gradients_is_state_like_any_other():
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert tulle.profile(model, optimizer, torch.arange(20).view(5, 4)).optimizer.state_share >= 1


def test_pieces_and_update_are_most_of_the_step():
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    found = tulle.profile(model, torch.optim.SGD(model.parameters()), torch.randn(256, 400))
    dense_bytes = sum(module.parameters_bytes for module in found.modules)
    pieces_s = sum(module.forward_s + module.backward_s for module in found.modules)
    whole_s = pieces_s + dense_bytes * found.optimizer.step_s_per_byte
    assert 0.3 < whole_s / found.step_s < 3  # a machine that is busy; benchmarks/forecast says how exact it is


def test_what_would_be_split_is_summed_twice_a_layer():
    model, optimizers = made()
    found = tulle.profile(model, optimizers, ids(3, 1, 3, 7))
    within = [module.split for module in found.modules if module.split is not None]
    assert sum(split.all_reduced_bytes for split in within) == 2 * 4 * WIDTH * 4  # attention and feed-forward
    assert all(0 < split.share <= 1 for split in within)
    assert next(module for module in found.modules if module.name == "head").split is None


def test_a_layer_that_stands_alone_is_gathered_and_its_inputs_gradient_is_summed():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8))
    found = splits(model, ["0", "1"], {"0": 120, "1": 160}, {"0": 0, "1": 120}, ranks=2)
    assert found["0"] == Split(1.0, all_reduced_bytes=120, all_reduced_again_bytes=0)
    assert found["1"] == Split(1.0, 0, gathered_bytes=160, all_reduced_again_bytes=120)


class Alone(nn.Module):
    """Layers that are split each in its own way, the first of numbers that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(4096, 64), nn.Linear(512, 512)
        self.body, self.last = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0), nn.Linear(64, 4096)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.last(self.body(self.table(ids))).mean() + self.first(numbers).mean()


@on_ranks(2)
def test_what_split_layers_are_predicted_to_send_is_what_they_send():
    mesh = tulle.init(model=2)
    torch.manual_seed(0)
    model = Alone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sample = torch.arange(12).view(3, 4), torch.ones(3, 512)
    patches.setattr(timing, "BUDGET_S", 0.02)
    found = tulle.profile(model, optimizer, sample, mesh)
    step = lower(Plan({"data": 1, "model": 2}), found, found.cluster, batch=found.batch)
    predicted_bytes = sum(task.sent_bytes for task in step.tasks if task.axis == "model")
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=Plan({"model": 2}))
    for _ in range(2):  # the first sends other things too
        traffic.take_labels()
        model(*sample).backward()
        sent = {name: count.bytes_sent for name, count in traffic.take_labels().items()}
        optimizer.step()
    assert {"table", "first", "body", "last"} <= sent.keys()
    assert sum(sent[name] for name in ("table", "first", "body", "last")) == predicted_bytes


def test_what_would_be_split_goes_by_the_ranks_of_the_axis_where_there_is_one():
    thirds, small = nn.TransformerEncoderLayer(9, 3, 12), nn.Linear(8, 6)
    model = nn.Sequential(thirds, small)
    assert splits(model, ["0", "1"], {}, {}) == splits(model, ["0", "1"], {}, {}, ranks=2) == {}
    assert splits(model, ["0", "1"], {}, {}, ranks=3).keys() == {"0"}
    assert splits(nn.Sequential(small), ["0"], {}, {}) == {}
    assert splits(nn.Sequential(small), ["0"], {}, {}, ranks=2).keys() == {"0"}, "there is nothing else"


def test_a_layer_with_an_adapter_within_does_not_end_a_profile():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    layer.linear1 = nn.Sequential(layer.linear1)
    assert "0" in splits(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), layer), ["0", "1"], {}, {}, ranks=2)


def test_nothing_is_left_behind():
    model, optimizers = made()
    model(ids(1, 2)).backward()
    optimizers[0].step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    steps = [state["step"].clone() for state in optimizers[0].state.values()]
    random.seed(5)
    torch.manual_seed(5)
    tulle.profile(model, optimizers, ids(3, 1, 3, 7))
    drawn = random.random(), torch.rand(1)
    random.seed(5)
    torch.manual_seed(5)
    assert drawn == (random.random(), torch.rand(1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(
        torch.equal(gradients[name].to_dense(), p.grad.to_dense())
        for name, p in model.named_parameters()
        if name in gradients
    )
    assert steps == [state["step"] for state in optimizers[0].state.values()]
    assert not optimizers[1].state
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_memory_is_measured_too(monkeypatch):
    with tulle.deferred_init():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for fits in (True, False):
        monkeypatch.setattr(measure, "_fits", lambda *_, fits=fits: fits)
        found = tulle.profile(model, optimizer, torch.ones(4, 6))
        assert [module.name for module in found.modules] == ["0", "1"]
        assert all(module.forward_s > 0 for module in found.modules)
        assert found.optimizer.state_share == pytest.approx(2.0)
        assert model[0].weight.is_meta


def test_a_profile_moves_as_json(tmp_path):
    model, optimizers = made()
    found = tulle.profile(model, optimizers, ids(3, 1))
    found.save(tmp_path / "profile.json")
    read = Profile.load(tmp_path / "profile.json")
    assert read == found
    assert [rows.tolist() for rows in read.tables[0].stream[0]] == [[1, 3, 49]]


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(PlanError, match=r"cannot read a profile from .* write it with Profile.save or tulle profile"):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize("further", [torch.ones(4, 6), {"x": torch.ones(4, 6)}, 3, "abc"])
def test_one_batch_is_no_list_of_further_samples(further):
    model = nn.Linear(6, 2)  # which takes a row of a batch, too
    said = f"was given a {type(further).__name__} as further, expected a list of samples"
    with pytest.raises(ModelError, match=said):
        tulle.profile(model, torch.optim.SGD(model.parameters()), torch.ones(4, 6), further=further)


@on_ranks(2)
def test_on_a_mesh_each_rank_brings_its_samples():
    patches.setattr(timing, "BUDGET_S", 0.01)
    mesh = tulle.init(data=2)
    give_network(mesh["data"])
    model, optimizers = made()
    found = tulle.profile(model, optimizers, ids(mesh.rank, 4), mesh)
    assert [rows.tolist() for rows in found.tables[0].stream[0]] == [[0, 4, 49], [1, 4, 49]]
    assert found.cluster.ranks == 2
    assert found.networks["data"].bandwidth_bytes_per_s > 0
    assert found.cluster.machine.slowdown >= 1
    everyone = tulle.comm.gather_values(found.to_json(), mesh["data"], label="test")
    assert {key: everyone[0][key] for key in ("modules", "step_s")} == {
        key: everyone[1][key] for key in ("modules", "step_s")
    }


def test_hosts_with_unlike_numbers_of_ranks_are_a_cluster_of_as_many(monkeypatch):
    network = Network(1e-4, 1e9)
    monkeypatch.setattr(machine, "probe", lambda _: network)
    monkeypatch.setattr(machine, "overlap", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(machine, "_machine", lambda _: Machine(1e12, 1e11))
    alone = measure._alone()
    found = [machine.measure_cluster(replace(alone, size=3, hosts=hosts)) for hosts in ((0, 0, 2), (0, 0, 0))]
    assert [(one.ranks, one.network(3)) for one in found] == [(3, network)] * 2


@on_ranks(2)
def test_ranks_with_unlike_numbers_of_samples_are_told():
    mesh = tulle.init(data=-1)
    model, sample = nn.Linear(2, 2), torch.ones(3, 2)
    with pytest.raises(ModelError, match="was given 2, 1 samples on ranks 0 to 1, with those of further="):
        tulle.profile(model, torch.optim.SGD(model.parameters()), sample, mesh, further=[sample] * (mesh.rank == 0))


@on_ranks(2)
def test_a_rank_whose_sample_does_not_fit_stops_all():
    mesh = tulle.init(data=2)
    model, optimizers = made()
    sample = ids(ROWS) if mesh.rank else ids(1, 2)
    said = rf"could not be profiled on the sample, because IndexError.* \({re.escape(__file__)}:\d+, in forward\)"
    with pytest.raises(ModelError, match=said):
        tulle.profile(model, optimizers, sample, mesh)


@on_ranks(2)
def test_what_has_no_step_to_measure_is_refused_on_all_ranks_by_what_it_lacks():
    mesh = tulle.init(data=2)
    (model, _), (frozen, _) = made(), made()
    frozen.requires_grad_(mesh.rank == 0)
    optimizer, lbfgs = torch.optim.SGD(frozen.parameters()), torch.optim.LBFGS(model.parameters())
    with pytest.raises(ModelError, match=f"the parameters of this {type(frozen).__name__} are all frozen: let some"):
        tulle.profile(frozen, optimizer, ids(1, 2), mesh)
    with pytest.raises(
        ModelError, match=r"LBFGS.step\(\) asks for a closure, .*: profile the model with torch.optim.SGD"
    ):
        tulle.profile(model, lbfgs, ids(1, 2), mesh)
    with pytest.raises(ModelError, match=r"the parameters of this Identity are none"):
        tulle.profile(nn.Identity(), optimizer, ids(1, 2), mesh)
    assert isinstance(tulle.plan(model, lbfgs, mesh, sample=ids(1, 2)), tulle.Plan), "tables go by their lookups"


class Sleepy(nn.Module):
    """Takes 8 ms, and 1 ms for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(8e-3 + 1e-3 * len(x))
        return (self.weight * x).sum()


@pytest.mark.slow  # by the clock: half of a step passed for a third of it where others worked
@pytest.mark.parametrize(("samples", "expected"), [(16, 1 / 3), (1, 0.0)])
def test_what_fewer_samples_do_not_make_shorter_is_measured(samples, expected):
    model = Sleepy()
    found = tulle.profile(model, torch.optim.SGD(model.parameters()), torch.ones(samples, 2))
    assert found.fixed_share == pytest.approx(expected, abs=0.15)
    assert Profile.from_json(found.to_json()).fixed_share == found.fixed_share


@pytest.mark.slow
def test_it_is_measured_what_fewer_columns_of_rows_do_not_make_shorter():
    def share(width, rows):
        model = nn.Sequential(nn.EmbeddingBag(4000, width, sparse=True), nn.Linear(width, 1))
        optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
        return tulle.profile(model, optimizers, torch.arange(rows).view(-1, 10)).optimizer.row_fixed_share

    narrow, wide = share(8, 4000), share(512, 4000)
    assert wide < narrow <= 1, "a row is found once, however wide it is"
    assert share(2, 1000) == 0.0, "too narrow to be made narrower"
