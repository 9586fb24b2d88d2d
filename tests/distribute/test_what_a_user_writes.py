"""The loops of the README run on any mesh, as they stand."""

import copy
import gc
import weakref

import pytest
import torch
from axes_models import worst_difference
from torch import nn
from torch.nn.utils import prune

import tulle
from gigabit import give_cluster
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.engine import living_split_tables
from tulle.errors import ModelError
from tulle.parts import Part


class Translator(nn.Module):
    """Takes a batch as one tensor, and gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4)))
        self.out = nn.Linear(8, 30)

    def forward(self, batch):
        return nn.functional.cross_entropy(self.out(self.layers(self.words(batch))).flatten(0, 1), batch.flatten())


def batches(rank, size, count=3):
    for step in range(count):
        yield torch.randint(30, (8, 4), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]


def make():
    torch.manual_seed(0)
    model = Translator().double()
    return model, torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-3)


def plain_loop(model, optimizer, loader):
    losses = []
    for batch in loader:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@tulle.step(micro_batches=2)
def train_step(model, batch):
    loss = model(batch)
    loss.backward()
    return loss


def step_loop(model, optimizer, loader):
    losses = []
    for batch in loader:
        losses.append(train_step(model, batch).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_mesh(shape, plan="auto"):
    mesh = tulle.init(**shape)
    rank, size = 0, 1
    if "data" in mesh:
        rank, size = mesh["data"].rank, mesh["data"].size
    model, optimizer = make()
    sample = next(batches(rank, size))
    with give_cluster(mesh):
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan, sample=sample)
    return mesh, model, optimizer, rank, size


@on_ranks(4)
@pytest.mark.parametrize("loop", [plain_loop, step_loop], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize(
    "shape",
    [
        {"data": 2, "pipe": 2},
        pytest.param({"data": 4}, marks=pytest.mark.slow),
        pytest.param({"pipe": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param({"pipe": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loop_gives_the_numbers_of_one_process(loop, shape):
    reference, expected = make()
    wanted = plain_loop(reference, expected, batches(0, 1))
    _, model, optimizer, rank, size = on_mesh(shape)
    found = loop(model, optimizer, tulle.lookahead(batches(rank, size)))
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12
    assert size > 1 or found == pytest.approx(wanted, rel=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("shape", [{"data": 2}, {"data": 1, "pipe": 2}], ids=str)
def test_a_step_that_does_not_say_runs_as_the_plan_says(shape):
    plan = tulle.Plan(shape, micro_batches=4, pipeline_schedule="gpipe")
    _, model, _, rank, size = on_mesh(shape, plan)
    step = tulle.step()(train_step.__wrapped__)
    assert len(step(model, next(batches(rank, size))).outputs) == 4
    assert len(tulle.step(train_step.__wrapped__)(model, next(batches(rank, size))).outputs) == 4
    assert len(train_step(model, next(batches(rank, size))).outputs) == 2


@on_ranks(2)
@pytest.mark.parametrize("axis", ["data", "pipe", "model"])
def test_what_rank_0_alone_has_read_all_start_from(axis):
    mesh = tulle.init(**{axis: 2})
    (reference, _), (model, optimizer) = make(), make()
    if mesh.rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    stages = {"words": 0, "layers": 0, "out": 1} if axis == "pipe" else {}
    tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, stages=stages))
    whole = tulle.full_state_dict(model, everywhere=True)
    assert all(torch.equal(whole[name].cpu(), value.cpu()) for name, value in reference.state_dict().items())


@on_ranks(4)
def test_a_plan_with_stages_comes_back_from_its_file(tmp_path):
    mesh, model, optimizer, rank, size = on_mesh({"data": 2, "pipe": 2})
    plan = tulle.plan(model, optimizer, mesh)
    path = tmp_path / f"plan-{mesh.rank}.json"
    plan.save(path)
    assert set(plan.stages.values()) == {0, 1}
    plain = make()
    assert tulle.plan(*plain, mesh, sample=next(batches(rank, size))).stages, "a plan can be made without putting it on"
    again, other = tulle.distribute(*plain, mesh, plan=str(path))
    assert plan.diff(tulle.plan(again, other, mesh)) == []


@on_ranks(4)
def test_dropout_of_replicas_differs_and_that_of_parts_does_not():
    mesh = tulle.init(data=2, model=1, pipe=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 64), nn.Dropout(0.5)).double()
    stages = {"0": 0, "1": 0, "2": 1, "3": 1}
    tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh, plan=tulle.Plan(mesh.shape, stages=stages))

    @tulle.step(micro_batches=1)
    def dropped(model, batch):
        result = model(batch)
        result.sum().backward()
        return (result == 0).double()

    mask = dropped(model, torch.ones(2, 4).double()).concat()
    masks = [torch.empty_like(mask) for _ in range(4)]
    torch.distributed.all_gather(masks, mask)
    by_data = {rank: masks[rank] for rank in range(4)}
    data, pipe = mesh["data"], mesh["pipe"]
    assert torch.equal(by_data[pipe.ranks[0]], by_data[pipe.ranks[1]])
    assert not torch.equal(by_data[data.ranks[0]], by_data[data.ranks[1]])


@on_ranks(4)
def test_a_model_that_was_dropped_takes_no_part_in_the_lookahead_of_the_next():
    mesh, model, optimizer, rank, size = on_mesh({"data": 2, "pipe": 2}, {"words.weight": "rows"})
    plain_loop(model, optimizer, tulle.lookahead(batches(rank, size)))
    dropped, has_table = weakref.ref(model), bool(living_split_tables())
    assert has_table == (mesh["pipe"].rank == 0)
    del model, optimizer
    if mesh["data"].rank == 0:
        gc.collect()
    for _ in tulle.lookahead([torch.zeros(1)]):
        assert dropped() is None or not has_table, "a stage without tables leaves it to Python's own collection"


class Product(torch.autograd.Function):
    """A kernel of the user's own, whose backward reads the weight too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).T @ x.flatten(0, 1)


class Gate(nn.Module):
    """Reads the weights of a layer in it, which its rule for axis `model` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down((Product.apply(x, self.up.weight) + self.up.bias).tanh())


def split_gate(gate: Gate, to: tensor_parallel.Splitter) -> None:
    to.enter(gate, "x")
    to.column(gate.up)
    to.row(gate.down)


def with_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(layer, Gate(), nn.Linear(8, 1)).double()


X = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WRONG = {
    "kaiming_uniform_": lambda linear: linear.reset_parameters(),
    "uniform_": lambda linear: nn.init.xavier_uniform_(linear.weight),
    "normal_": lambda linear: linear.weight.data.normal_(),
    "__getitem__": lambda linear: linear.weight[3],
    "linear": lambda linear: nn.functional.linear(X, linear.weight),
    "cdist": lambda linear: torch.cdist(X[0], linear.weight),
    "max": lambda linear: linear.weight.max().backward(),
    "topk": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
}


@on_ranks(2)
def test_a_part_of_a_layer_is_not_taken_for_the_whole():
    tensor_parallel.register(Gate, split_gate)
    model, reference = with_layers(), with_layers()
    tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.1), tulle.init(model=2))
    for taker, wrong in WRONG.items():
        with pytest.raises(
            ModelError, match=rf"^{taker} was given '0.linear1.weight' .* this rank has \[8, 8\] of \[16, 8\]"
        ):
            wrong(model[0].linear1)
        wrong(reference[0].linear1)  # the twin: of a layer that is whole it is right
    nn.init.zeros_(model[0].linear1.weight)
    model[0].norm1.reset_parameters()
    model[2].reset_parameters()
    with pytest.raises(RuntimeError, match=r"linear1.weight: .* of shape \[4, 8\], expected \[16, 8\], the whole"):
        model.load_state_dict({"0.linear1.weight": torch.zeros(4, 8)}, strict=False)


def penalized(model, averaged):
    """A loop that does to each number of the weights what it likes, with a step of first-order MAML in it."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    if averaged is None:
        tulle.distribute(model, optimizer, tulle.init(model=2))
        averaged = copy.deepcopy(model)
    for _ in range(3):
        moved = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(model(X).pow(2).mean(), [*moved.values()])
        moved = {name: p - 0.1 * g for (name, p), g in zip(moved.items(), gradients, strict=True)}
        loss = torch.func.functional_call(model, moved, (X,)).pow(2).mean()
        (loss + 0.01 * sum(p.pow(2).sum() + p.cosh().sum() for p in model.parameters())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
                parameter.mul_(0.99).clamp_(-1.0, 1.0)
                parameter.data.add_(parameter.tanh(), alpha=-1e-3)
                average.lerp_(parameter, 0.5)
            torch._foreach_mul_([*model.parameters()], 0.999)
    return model, averaged


@on_ranks(2)
def test_what_treats_every_number_of_a_layer_by_itself_goes_on_with_the_numbers_of_one_process():
    tensor_parallel.register(Gate, split_gate)
    reference = with_layers()
    for found, wanted in zip(
        penalized(with_layers(), None), penalized(reference, copy.deepcopy(reference)), strict=True
    ):
        assert worst_difference(found.state_dict(), wanted.state_dict()) < 1e-12
    model, averaged = penalized(with_layers(), None)
    assert type(model[0].linear1.weight) is Part, "guarded again after each forward and each step"
    assert type(averaged[0].linear1.weight) is Part, "a copy has parts of its own"


PENALTIES = {
    "L2": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "L1": lambda model: sum(p.abs().sum() + p.norm(1) for p in model.parameters()),
    "group lasso": lambda model: sum(p.norm() + torch.linalg.vector_norm(p, 3) for p in model.parameters()),
    "root": lambda model: sum((1e-3 + p.square().sum()).sqrt() for p in model.parameters()),
    "mean": lambda model: sum((p * p).mean() for p in model.parameters()),
    "of two": lambda model: (model[0].linear1.weight * model[1].up.weight).sum().square(),
    "from a point": lambda model: sum(
        nn.functional.mse_loss(p, torch.ones_like(p)) + nn.functional.l1_loss(p, torch.ones_like(p), reduction="sum")
        for p in model.parameters()
    ),
}
LOOKED_AT = (
    lambda w: w.norm(),
    lambda w: w.max() + w.data.min() + w.norm(float("inf")) + w.detach().new_zeros(()),
    lambda w: w.data.abs().mean() + w.data.float().double().norm() + w.std(unbiased=False),
    lambda w: (w == 0).sum() + (w > 0).float().mean() + torch.count_nonzero(w),
    lambda w: w.isnan().any() | w.data.isfinite().all(),
    lambda w: torch._foreach_norm([w, w])[1] + torch._foreach_norm([w.data], 1)[0] + torch._foreach_max([w])[0],
    lambda w: nn.utils.get_total_norm([w], foreach=True),
)


def penalized_by(penalties, model, x, mesh=None, plan="auto"):
    """The numbers of all penalties in two steps, and those of weights that are looked at afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if mesh is not None:
        tulle.distribute(model, optimizer, mesh, plan=plan)
    numbers = []
    for _ in range(2):
        found = [penalty(model) for penalty in penalties.values()]
        (model(x).pow(2).mean() + 0.01 * sum(found)).backward()
        numbers += [one.item() for one in found]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        numbers += [penalty(model).item() for penalty in penalties.values()]
    return numbers + [look(p).item() for p in model[1].parameters() for look in LOOKED_AT]


@on_ranks(4)
@pytest.mark.parametrize("shape", [{"data": 2, "model": 2}, pytest.param({"data": 4}, marks=pytest.mark.slow)], ids=str)
def test_numbers_of_weights_are_those_of_the_whole_and_have_its_gradients(shape):
    tensor_parallel.register(Gate, split_gate)
    mesh, reference = tulle.init(**shape), with_layers()
    wanted = penalized_by(PENALTIES, reference, X)
    data = mesh["data"]
    for full in (False, True) if "model" in shape else (True,):
        plan = tulle.Plan(mesh.shape, memory=tulle.Memory(full_shard=full))
        model = with_layers()
        found = penalized_by(PENALTIES, model, X.chunk(data.size)[data.rank], mesh, plan)
        assert found == pytest.approx(wanted, rel=1e-12)
        assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@tulle.step(micro_batches=2)
def penalized_step(model, x):
    found = [PENALTIES[name](model) for name in ("L2", "group lasso", "mean")]
    loss = model(x).pow(2).mean() + 0.01 * sum(found)
    loss.backward()
    return torch.stack([loss, *found])


@on_ranks(4)
@pytest.mark.parametrize("shape", [{"pipe": 2, "model": 2}, {"data": 2, "pipe": 2}], ids=str)
def test_penalties_of_stages_have_the_numbers_of_the_whole(shape):
    tensor_parallel.register(Gate, split_gate)
    mesh, model, reference = tulle.init(**shape), with_layers(), with_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    memory = tulle.Memory(full_shard="data" in shape)
    plan = tulle.Plan(mesh.shape, stages={"0": 0, "1": 1, "2": 1}, memory=memory)
    tulle.distribute(model, optimizer, mesh, plan=plan)
    theirs = torch.optim.SGD(reference.parameters(), 0.01)
    x = X[:1].expand(4, -1, -1)  # so that losses of shares are those of all
    for _ in range(2):
        wanted, found = penalized_step(reference, x).mean(), penalized_step(model, x).mean()
        assert torch.allclose(found, wanted, rtol=1e-12, atol=0)
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), reference.state_dict()) < 1e-12


@on_ranks(2)
def test_what_one_rank_alone_asks_of_what_is_shared_out_is_told_by_name():
    mesh, model = tulle.init(data=2), with_layers()
    plan = tulle.Plan(mesh.shape, memory=tulle.Memory(full_shard=True))
    tulle.distribute(model, torch.optim.SGD(model.parameters(), 0.01), mesh, plan=plan)
    with pytest.raises(ModelError, match=r"one number of all of '0.linear1.weight' on rank 0"):
        model(X) if mesh.rank else model[0].linear1.weight.norm()


@on_ranks(2)
def test_a_model_with_stages_may_be_moved_and_converted():
    mesh = tulle.init(pipe=2)
    torch.manual_seed(0)
    model, optimizer = make()
    tulle.distribute(model, optimizer, mesh, sample=next(batches(0, 1)))
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    model.to(mesh.device).cpu().to(mesh.device, torch.float64)
    assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} == here
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
