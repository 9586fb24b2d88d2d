"""With a sample `plan="auto"` is the planner's choice within the mesh, exact, and kept for the next run."""

from unittest import mock

import pytest
import torch
from axes_models import batch_of, build, distributed, optimizers, train, worst_difference
from torch import nn

import tulle
from gigabit import give_cluster
from ranks import on_ranks
from tulle.distribute import mesh_of, planned
from tulle.distribute.adopted import plan_of
from tulle.distribute.axes import Axes
from tulle.distribute.watching import watch
from tulle.errors import MeshError, ModelError, PlanError
from tulle.plan import Shelf
from tulle.tensor_parallel import placements

PROFILE = "tulle.distribute.planned.profile"
LOGGER = "tulle.distribute.watching.logger"


def of_one_process(kind):
    model = build(kind)
    return model, train(model, optimizers(model))


def first_plan(mesh, kind="words", **options):
    model = build(kind)
    data = mesh["data"]
    with give_cluster(mesh):
        return tulle.plan(model, optimizers(model), mesh, sample=(batch_of(0, data.rank, data.size),), **options)


@on_ranks(2)
def test_a_sample_has_everything_chosen_and_the_numbers_stay():
    model, several, place = distributed("words", {"data": 2}, plan="anew")
    train(model, several, *place)
    reference, _ = of_one_process("words")
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    plan = tulle.plan(model, several)
    assert plan.prediction.ranks == 2
    assert plan.prediction.batch == 8
    assert plan.schemes["words.weight"] != "auto"


@on_ranks(4)
@pytest.mark.parametrize("kind", ["words", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_without_a_mesh_one_is_chosen_and_the_numbers_stay(kind):
    model, whole = build(kind), tulle.init()
    several = optimizers(model)
    sample = (batch_of(0, whole.rank, whole.size),)
    with give_cluster(whole), mock.patch("tulle.distribute.putting.watch") as watched:
        tulle.distribute(model, several, sample=sample)
    assert whole.rank or watched.call_args.kwargs["key"], "what its steps take is noted with the plan"
    mesh = mesh_of(model)
    assert tulle.plan(model, several).prediction.ranks == mesh.size == 4
    train(model, several, mesh["data"].rank, mesh["data"].size)
    reference, _ = of_one_process(kind)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
def test_without_a_mesh_a_sample_that_one_rank_lacks_counts_as_none():
    model, whole = build("words"), tulle.init()
    several = optimizers(model)
    tulle.distribute(model, several, sample=(batch_of(0, 0, 2),) if whole.rank else None)
    assert tulle.plan(model, several).prediction is None


@on_ranks(2)
def test_longer_samples_hooked_modules_and_tables_that_cannot_be_split_have_plans_of_their_own():
    mesh, model = tulle.init(data=2), nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def key(length):
        wanted = planned.Wanted(model, [optimizer], mesh, torch.zeros(4, length, dtype=torch.long))
        return planned._key(wanted, Axes.of(mesh))

    first = key(16)
    assert key(17) == first
    model[0].weight.register_hook(lambda grad: grad)
    unsplit = key(16)
    model[1].register_forward_hook(lambda module, given, result: None)
    assert len({first, unsplit, key(16), key(64)}) == 4


@on_ranks(2)
def test_a_sample_that_forward_refuses_is_refused_though_a_plan_for_one_of_its_size_is_kept():
    mesh, ids = tulle.init(data=2), torch.zeros(4, 16, dtype=torch.long)
    model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for sample in (ids, {"input": ids}):
        tulle.plan(model, optimizer, mesh, sample=sample)
    for sample in ({"inputs": ids}, (ids, ids[:0])):
        with pytest.raises(ModelError, match="could not be profiled on the sample, because TypeError"):
            tulle.plan(model, optimizer, mesh, sample=sample)


@on_ranks(2)
def test_optimizer_state_is_shared_out_beside_tables_that_are_split_whatever_it_costs():
    with tulle.deferred_init():
        model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 1))
    mesh, ids = tulle.init(data=2), torch.zeros(4, 3, dtype=torch.long)
    table, *others = model.parameters()

    def shares(*several):
        space = planned._space(planned.Wanted(model, several, mesh, ids), Axes.of(mesh))
        return any(memory.shard_optimizer for memory in space.memories)

    assert shares(torch.optim.Adam(model.parameters()))
    assert shares(torch.optim.Adam([table]), torch.optim.Adam(others))
    assert not shares(torch.optim.Adam([table]), torch.optim.Adafactor(others))


@on_ranks(2)
def test_optimizer_state_is_not_shared_out_where_an_optimizer_that_takes_wholes_might_step_tables_that_stay_whole():
    """As one does that steps nothing but tables, each of which may be split or not."""
    model = nn.ModuleList([nn.Embedding(30, 4), nn.Embedding(30, 1)])
    mesh, ids = tulle.init(data=2), torch.zeros(4, 3, dtype=torch.long)

    def shares(*several):
        return planned._space(planned.Wanted(model, several, mesh, ids), Axes.of(mesh)).shares_with_tables

    assert not shares(torch.optim.Adafactor(model.parameters()))
    assert shares(torch.optim.Adam(model.parameters()))


@on_ranks(2)
def test_a_plan_brings_its_mesh():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plan = tulle.Plan({"pipe": 2}, stages={"0": 0, "1": 1})
    with pytest.raises(MeshError, match="is on no mesh yet"):
        mesh_of(model)
    tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    assert mesh_of(model)["pipe"].size == 2


class Twice(nn.Module):
    """One layer by two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(4, 4, dtype=torch.double)
        self.head = nn.Linear(4, 1, dtype=torch.double)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh())).sum()


@on_ranks(2)
def test_a_shared_module_goes_by_any_of_its_names():
    reference, x = Twice(), torch.ones(3, 4, dtype=torch.double)
    reference(x).backward()
    for names in (["second"], ["second", "first"]):
        model = Twice()
        model.load_state_dict(reference.state_dict())
        plan = tulle.Plan({"pipe": 2}, stages={**dict.fromkeys(names, 0), "head": 1})
        tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
        assert dict(plan_of(model).stages) == {"first": 0, "head": 1}
        model(x).backward()
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is None or torch.allclose(mine.grad, whole.grad, rtol=1e-12)
    model, apart = Twice(), tulle.Plan({"pipe": 2}, stages={"first": 0, "second": 1, "head": 1})
    with pytest.raises(PlanError, match="'first' to stage 0 and 'second' to stage 1, and both are names of one module"):
        tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=apart)


@on_ranks(2)
def test_a_plan_is_made_once_and_anew_on_request():
    mesh = tulle.init(data=2)
    made = first_plan(mesh, "stack")
    with mock.patch(PROFILE, side_effect=AssertionError("it was kept")):
        assert first_plan(mesh, "stack").diff(made) == []
    with mock.patch(PROFILE, wraps=planned.profile) as profiled, mock.patch.dict("os.environ", {"TULLE_ANEW": "1"}):
        first_plan(mesh, "stack")
    assert profiled.called
    with mock.patch(PROFILE, wraps=planned.profile) as profiled:
        first_plan(mesh, "words")  # the twin: another model is another key
        first_plan(tulle.init(data=1, pipe=2), "stack")
    assert profiled.called


@on_ranks(2)
def test_a_kept_plan_that_was_off_is_told_of():
    mesh = tulle.init(data=2)
    plan = first_plan(mesh)
    shelf = Shelf.of()
    key = next(path.stem for path in shelf.folder.glob("*.json") if shelf.find(path.stem).diff(plan) == [])
    stepping = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with mock.patch(LOGGER) as logger, mock.patch("tulle.distribute.watching.now_s", side_effect=range(10**6)):
        watch(plan, nn.Linear(1, 1), stepping, key=key if mesh.rank == 0 else "")
        for _ in range(60):
            stepping.step()
    assert logger.warning.call_count == 1
    torch.distributed.barrier()
    assert "the last 50 took 1 s" in shelf.noted(key)
    with mock.patch("tulle.distribute.planned.logger") as logger:
        first_plan(mesh)
    assert logger.warning.call_count == (mesh.rank == 0)
    torch.distributed.barrier()
    if mesh.rank == 0:
        shelf.put(key, plan)
        assert shelf.noted(key) is None, "what was said of the earlier one goes with it"


@on_ranks(2)
def test_small_layers_are_planned_for_where_the_mesh_splits_them():
    mesh = tulle.init(model=2)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with give_cluster(mesh):
        plan = tulle.plan(model, optimizer, mesh, sample=torch.ones(4, 8))
    assert plan.prediction is not None, plan.offers
    tulle.distribute(model, optimizer, mesh, plan=plan)
    assert placements(model)


@on_ranks(2)
def test_without_a_sample_tables_only_are_chosen_and_the_plan_says_so():
    mesh = tulle.init(data=2)
    model = build("words")
    plan = tulle.plan(model, optimizers(model), mesh)
    assert plan.prediction is None
    assert "if sample= is a batch that the model trains on" in plan.explain()


class Odd(nn.Module):
    """Trains, but cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 4, sparse=True)

    def forward(self, words):
        return self.table(words)

    def __deepcopy__(self, _):
        raise RuntimeError("there is one of me")


@on_ranks(2)
def test_what_cannot_be_profiled_is_planned_by_its_tables():
    mesh = tulle.init(data=2)
    model = Odd()
    with give_cluster(mesh), mock.patch("tulle.distribute.choosing.logger") as logger:
        plan = tulle.plan(model, torch.optim.SGD(model.parameters(), 0.1), mesh, sample=torch.tensor([[1, 2]]))
    assert logger.warning.call_count == (mesh.rank == 0), "all know it, one says it"
    assert plan.prediction is None
    assert plan.tables[0].density is not None
    assert "there is one of me" in plan.explain()


class Sends(nn.Sequential):
    """Has a collective of its own, as contrastive losses and codebooks have."""

    def forward(self, ids):
        found = super().forward(ids)
        torch.distributed.all_reduce(found.detach())
        return found


@on_ranks(2)
def test_a_model_that_sends_by_itself_is_planned_by_its_tables():
    mesh = tulle.init(data=2)
    model = Sends(nn.EmbeddingBag(30, 4, sparse=True))
    with give_cluster(mesh):
        plan = tulle.plan(model, torch.optim.SGD(model.parameters(), 0.1), mesh, sample=torch.tensor([[1, 2]]))
    assert plan.prediction is None
    assert plan.tables[0].density is not None
    assert "a Sends sends to other ranks when it runs" in plan.explain()
    pipe = tulle.init(pipe=2)
    model = Sends(nn.EmbeddingBag(30, 4, sparse=True))
    with give_cluster(pipe), pytest.raises(ModelError, match="sends to other ranks when it runs"):
        tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), pipe, sample=torch.tensor([[1, 2]]))
