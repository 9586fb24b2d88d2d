"""A model built without memory: each rank makes its own part, with the numbers of one process."""

import json

import pipeline_networks as networks
import pytest
import torch
from pipeline_networks import ALL, Chain, Norms, TiedEnds, make, spread
from torch import nn

import tulle
from raised_alike import every_rank_raises
from ranks import on_ranks, run_on_ranks
from tulle import pipeline
from tulle.deferred import materialize
from tulle.errors import CheckpointError, ModelError


class Initialized(nn.Module):
    """Draws in all the ways that constructors do, some of it twice, and looks at numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in self.rates)
        self.table = nn.Embedding(7, 5, padding_idx=2)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
            nn.init.trunc_normal_(layer.bias, std=0.02)
        with torch.no_grad():
            self.layers[1].weight.mul_(torch.bernoulli(torch.full((5, 5), 0.5)))
            self.layers[2].weight.copy_(self.layers[0].weight + self.table.weight[:5])
        self.register_buffer("order", torch.randperm(5), persistent=False)
        self.register_buffer("angles", 1.0 / 10 ** (torch.arange(0, 5, 2).float() / 5), persistent=False)


@pytest.mark.parametrize("kind", [Initialized, *ALL])
def test_parameters_and_buffers_are_those_of_one_process(kind):
    torch.manual_seed(3)
    expected = kind()
    drawn = torch.rand(3)
    torch.manual_seed(3)
    with tulle.deferred_init():
        model = kind()
    assert any(parameter.is_meta for parameter in model.parameters())
    materialize(model)
    assert torch.equal(torch.rand(3), drawn), "the stream of random numbers goes on as in one process"
    for (name, one), (_, other) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), expected.buffers(), strict=True))


@on_ranks(2, 3)
def test_no_rank_makes_more_than_its_part_and_training_is_that_of_one_process():
    mesh = tulle.init(pipe=-1)
    for kind in (Chain, TiedEnds, Norms):
        reference = make(kind)
        torch.manual_seed(0)
        with tulle.deferred_init():
            model = kind()
        reference = reference.float()
        pipeline.place(model, mesh["pipe"], spread(model, mesh.size))
        step = pipeline.step(micro_batches=2)(networks.train)
        x = torch.randn(4, networks.WIDTH, generator=torch.Generator().manual_seed(1))
        assert step(model, x).stack().tolist() == networks.one_process(reference, x, 2, 0, 0)
        assert networks.worst_gradient(model, reference) < 1e-6
        assert any(parameter.is_meta for parameter in model.parameters())


@on_ranks(2, 3)
def test_what_was_changed_in_the_meantime_is_refused_on_all_ranks_not_on_those_that_have_it():
    mesh = tulle.init(pipe=-1)
    with tulle.deferred_init():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(mesh.size)))
    last = mesh.size - 1
    model[last].double()
    stages = {str(stage): stage for stage in range(mesh.size)}
    text = f"'{last}.weight' was converted, or written to, after tulle.deferred_init"
    with every_rank_raises(ModelError, text, found_by=last):
        pipeline.place(model, mesh["pipe"], stages)


class Shuffled(nn.Module):
    """Its middle is there for real from the start; its order is drawn, and in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.last.register_buffer("order", torch.randperm(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))[:, self.last.order]


@on_ranks(1, 3)
@pytest.mark.parametrize("is_dealt", [False, True])
def test_random_numbers_go_on_alike_on_all_ranks_whatever_these_hold(is_dealt):
    mesh = tulle.init(pipe=-1)
    torch.manual_seed(3)
    expected = Shuffled()
    drawn = torch.rand(3)
    torch.manual_seed(3)
    with tulle.deferred_init():
        model = Shuffled()
    dealt = {"first": 0, "norm": 1, "last": 2}
    pipeline.place(model, mesh["pipe"], None if is_dealt else dealt, sample=torch.ones(2, 6))
    assert torch.equal(torch.rand(3), drawn)
    theirs = {**expected.state_dict(), "last.order": expected.last.order}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.is_meta != pipeline.placement_of(model).is_held(name)
        assert value.is_meta or torch.equal(value, theirs[name]), name


@on_ranks(1)
def test_a_profile_leaves_a_model_without_memory_and_the_random_numbers_as_they_are():
    mesh = tulle.init(pipe=-1)
    with tulle.deferred_init():
        model = Shuffled()
    before, tensors = torch.get_rng_state(), [*model.parameters(), *model.buffers()]
    assert set(pipeline.deal(model, torch.ones(2, 6), mesh["pipe"]).assignment.values()) == {0}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one is other for one, other in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert model.last.order.is_meta


def write(folder, how: str, state: dict[str, torch.Tensor]) -> str:
    if how == "torch":
        torch.save(state, folder / "weights.pt")
        return str(folder / "weights.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    names = list(state)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]} if how == "shards" else {}
    for file, held in (shards or {"model.safetensors": names}).items():
        safetensors.save_file({name: state[name].clone() for name in held}, folder / file)
    if shards:
        places = {name: file for file, held in shards.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


@pytest.mark.parametrize("how", ["torch", "whole", "shards"])
def test_each_rank_reads_its_part_of_a_checkpoint(tmp_path, how):
    model = make(TiedEnds)
    path = write(tmp_path, how, model.state_dict())
    run_on_ranks(2, reads_its_part, path=path)


def reads_its_part(path: str) -> None:
    mesh = tulle.init(pipe=-1)
    expected = make(TiedEnds).state_dict()
    torch.manual_seed(9)
    for without_memory in (tulle.deferred_init(), torch.device("meta")):
        before = torch.get_rng_state()
        with without_memory:
            model = TiedEnds().double()
        pipeline.place(model, mesh["pipe"], {"embed": 0, "middle": 0, "other": 1, "head": 1}, weights=path)
        for name, value in model.state_dict().items():
            assert value.is_meta or torch.equal(value, expected[name]), name
        assert torch.equal(torch.get_rng_state(), before), "nothing is drawn"
    with tulle.deferred_init():
        other = Chain()
    with pytest.raises(CheckpointError, match=r"does not hold \['layers"):
        pipeline.place(other, mesh["pipe"], spread(other, 2), weights=path)


def test_what_no_checkpoint_holds_has_the_values_of_one_process(tmp_path):
    torch.save(Shuffled().state_dict(), tmp_path / "weights.pt")
    run_on_ranks(2, makes_what_is_not_saved, path=str(tmp_path / "weights.pt"))


def makes_what_is_not_saved(path: str) -> None:
    mesh = tulle.init(pipe=-1)
    torch.manual_seed(3)
    expected = Shuffled()
    torch.manual_seed(3)
    with tulle.deferred_init():
        model = Shuffled()
    pipeline.place(model, mesh["pipe"], {"first": 0, "norm": 0, "last": 1}, weights=path)
    saved = torch.load(path)
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, saved[name])
    assert model.last.order.is_meta if mesh.rank == 0 else torch.equal(model.last.order, expected.last.order)
