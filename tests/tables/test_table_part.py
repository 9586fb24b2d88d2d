"""Parts of split tables are not taken for the whole, by name of the table; what is right for a part goes on."""

import copy
import pickle
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import tulle
from models import batches
from ranks import on_ranks
from tulle.errors import ModelError, PlanError
from tulle.mesh import Axis
from tulle.parts import Part, guard
from tulle.parts.guards import PartData
from tulle.tables import guard_table, split_as, split_of

ROWS, WIDTH = 40, 6


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids)).tanh()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


HIDDEN = torch.ones(3, WIDTH, dtype=torch.float64)
DRAWS = {
    "normal_": lambda table: nn.init.normal_(table),
    "uniform_": lambda table: table.data.uniform_(-0.1, 0.1),
}
PRETRAINED = torch.ones(ROWS, WIDTH, dtype=torch.float64)
WRONG_WITHOUT_GRADIENTS = DRAWS | {
    "_foreach_copy_": lambda table: torch._foreach_copy_([table.data], [PRETRAINED]),
    "_foreach_lerp_": lambda table: torch._foreach_lerp_([PRETRAINED.clone()], [table.data], 0.1),
}
WRONG_IN_TRAINING = DRAWS | {
    "T": lambda table: HIDDEN @ table.T,
    "linear": lambda table: F.linear(HIDDEN, (table * 2.0).tanh().to(HIDDEN.dtype)),
    "einsum": lambda table: torch.einsum("bw,rw->br", HIDDEN, table),
    "embedding": lambda table: F.embedding(torch.tensor([1, 2]), table),
    "__getitem__": lambda table: table[3],
    "index_select": lambda table: table.index_select(0, torch.tensor([1])),
    "unbind": lambda table: list(table),
    "tolist": lambda table: table.tolist(),
    "prod": lambda table: table.prod(),
    "logsumexp": lambda table: table.logsumexp((0, 1)).backward(),
    "torch.autograd.grad": lambda table: torch.autograd.grad([table * 2.0], [table], [torch.ones_like(table)]),
}


def part_of(placement: str) -> nn.Parameter:
    """What the second of two ranks has of a table."""
    nobody = cast("dist.ProcessGroup", None)  # nothing is sent
    axis = Axis("data", 1, 2, (0, 1), nobody, torch.device("cpu"), 0.0)
    split = split_as(placement, "words.weight", (ROWS, WIDTH), axis)
    parameter = nn.Parameter(split.take(torch.randn(ROWS, WIDTH, dtype=torch.float64)))
    guard_table(parameter, split)
    return parameter


@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_what_takes_a_part_for_the_whole_is_refused_by_name(placement):
    table, whole = part_of(placement), nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))
    before = table.to_local().clone()
    for context, wrong in ((torch.no_grad, WRONG_WITHOUT_GRADIENTS), (torch.enable_grad, WRONG_IN_TRAINING)):
        for name, read in wrong.items():
            with context(), pytest.raises(ModelError, match=rf"^{name} was .*the table 'words\.weight'.* split"):
                read(table)
            with context():
                read(whole)  # the twin: of a table that is not split it is right
    assert torch.equal(table.to_local(), before), "nothing was written"


@on_ranks(2)
def test_what_treats_every_number_by_itself_goes_on_with_the_numbers_of_one_process():
    mesh = tulle.init(data=-1)
    model, reference = build(), build()
    ours, theirs = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(reference.parameters(), lr=0.1, momentum=0.9)
    tulle.distribute(model, ours, mesh, plan="rows")
    with pytest.raises(ModelError, match="T was given"):  # on every rank
        model(torch.tensor([mesh.rank])) @ model.words.weight.T
    penalties = []
    for ids in batches(3, 4 * mesh.size):
        for one, optimizer, mine in ((model, ours, ids.chunk(mesh.size)[mesh.rank]), (reference, theirs, ids)):
            penalty = sum((p**2).sum() + p.abs().sum() + p.norm() for p in one.parameters())
            penalties.append(penalty.item())
            loss = one(mine).pow(2).mean() + 0.01 * penalty
            loss.backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(0.99).add_(parameter.grad, alpha=-0.01)
                    parameter.data.clamp_(-1.0, 1.0)
                torch._foreach_mul_([*one.parameters()], 0.999)
            optimizer.zero_grad()
    table = model.words.weight
    assert type(table) is Part, "guarded again after each step"
    assert repr(table)
    assert penalties[::2] == pytest.approx(penalties[1::2], rel=1e-12)
    for look in (torch.norm, lambda t: (t.data != 0).sum(), lambda t: t.abs().max()):
        assert look(table).item() == pytest.approx(look(reference.words.weight).item(), rel=1e-12)
    split = split_of(table)
    assert split is not None
    expected = split.take(reference.words.weight)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-14)
    same, copied = pickle.loads(pickle.dumps(table.data)), copy.deepcopy(table.data)
    assert type(same) is torch.Tensor
    assert torch.equal(same, table.to_local())
    assert isinstance(copied, PartData)
    assert torch.equal(copied, table.data)
    assert type(copy.deepcopy(table)) is Part


class Half:
    """What a square part has the first rows of; the others are zeros."""

    dims, count, layout, shape, is_gathered = [0], 32, "half", (8, 4), False

    def over(self, number, op):
        return number

    def held(self) -> None:
        return None

    def refusal(self, taker: str) -> str:
        return f"{taker} was given half of it"

    def refusal_of_gradient(self) -> None:
        return None


def square() -> nn.Parameter:
    """A part of a shape that fits where its transpose does."""
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    guard(weight, Half())
    return weight


def test_who_writes_all_of_what_nobody_gathers_is_told_of_load_state_dict():
    part, whole = square(), torch.randn(8, 4, dtype=torch.float64)
    for write in (lambda: part.data.copy_(whole), lambda: setattr(part, "data", whole)):
        with pytest.raises(ModelError, match=r"; model\.load_state_dict, called on every rank, takes of whole weights"):
            write()


FITS = torch.ones(4, 4, dtype=torch.float64)
WRONG_IF_SQUARE = {
    "T": lambda weight: (weight @ weight.T - torch.eye(4)).pow(2).sum(),
    "t": lambda weight: torch.mm(weight, weight.t()),
    "transpose": lambda weight: weight.transpose(0, 1),
    "matmul": lambda weight: torch.matmul(FITS, weight),
    "linear": lambda weight: F.linear(FITS, weight),
    "einsum": lambda weight: torch.einsum("ij,jk->ik", FITS, weight),
    "tril": lambda weight: weight.tril(),
    "flip": lambda weight: weight.flip(0),
    "eye": nn.init.eye_,
    "view_as": nn.init.orthogonal_,
}


ALONG = {
    "normalize": lambda weight, dim: F.normalize(weight, dim=dim),
    "softmax": lambda weight, dim: weight.softmax(dim),
    "log_softmax": lambda weight, dim: F.log_softmax(weight, dim - 2),
    "cumsum": lambda weight, dim: torch.cumsum(weight, dim=dim),
    "sort": lambda weight, dim: weight.sort(dim=dim, descending=True)[0],
    "topk": lambda weight, dim: weight.topk(4, dim)[0],
    "renorm": lambda weight, dim: weight.renorm(2, 1 - dim, 0.5),
    "normalize of data": lambda weight, dim: F.normalize(weight.data, dim=dim),
    "norm of data": lambda weight, dim: weight.data / weight.data.norm(dim=dim, keepdim=True),
    "argmax of data": lambda weight, dim: weight.data.argmax(dim) + weight.data,
}


@pytest.mark.parametrize("name", ALONG)
def test_what_mixes_numbers_along_the_cut_dimension_is_refused_and_along_others_right(name):
    part, whole = square(), nn.Parameter(square().to_local().clone())
    assert torch.equal(ALONG[name](part, 1).to_local(), ALONG[name](whole, 1))
    for context in (torch.no_grad, torch.enable_grad):
        with context(), pytest.raises(ModelError, match=f"^{name.split()[0]} was given half of it"):
            ALONG[name](part, 0)


ALONG_ALL = {
    "layer_norm": lambda weight: F.layer_norm(weight, weight.shape),
    "matrix_exp": torch.matrix_exp,
    "linalg_inv": torch.linalg.inv,
    "cov": torch.cov,
    "argmax": lambda weight: weight.argmax(),
    "var_mean": lambda weight: torch.var_mean(weight)[1].backward(),
}


@pytest.mark.parametrize("name", ALONG_ALL)
def test_what_mixes_all_numbers_is_refused(name):
    with pytest.raises(ModelError, match=f"^{name} was given half of it"):
        ALONG_ALL[name](square())
    F.layer_norm(square(), (4,))  # row by row


@pytest.mark.parametrize("name", WRONG_IF_SQUARE)
def test_a_square_part_is_not_taken_for_the_whole(name):
    weight = square()
    before = weight.to_local().clone()
    with pytest.raises(ModelError, match=f"^{name} was given half of it"):
        WRONG_IF_SQUARE[name](weight)
    assert torch.equal(weight.to_local(), before), "nothing was written"


def of_all(weight):
    weight.data[:] = weight.data[...] * 2


def by_mask_of_data(weight):
    weight.data[weight.data.abs() < 0.5] = 0.0


def by_mask(weight):
    with torch.no_grad():
        weight[weight < 0] = 0.0


def by_one_number(weight):
    with torch.no_grad():
        weight.mul_(torch.tensor([0.5], dtype=torch.float64))


def into_a_buffer(weight):
    buffer = torch.zeros(2, 4, 4, dtype=torch.float64)
    buffer[1] = weight.data
    weight.data.copy_(buffer.sum(0))


def in_place(weight):
    weight.data.clamp_(-0.5, 0.5)
    weight.data += 1.0
    weight.data = weight.data - 0.1 * torch.ones_like(weight)
    nn.init.constant_(weight[...].detach(), 0.3)


def by_constants(weight):
    nn.init.zeros_(weight)


WRITES = [of_all, by_mask_of_data, by_mask, by_one_number, into_a_buffer, in_place, by_constants]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_writes_every_number_by_itself_is_right_for_a_part(write):
    part, whole = square(), nn.Parameter(square().to_local().clone())
    write(part)
    write(whole)
    assert torch.equal(part.to_local(), whole.detach())


ZEROS = torch.zeros(4, 4, dtype=torch.float64)
PENALTIES = {
    "norm": lambda weight: weight.norm(1),
    "torch.norm": lambda weight: torch.norm(weight, p=1),
    "vector_norm": lambda weight: torch.linalg.vector_norm(weight, 1),
    "vector_norm, ord": lambda weight: torch.linalg.vector_norm(weight, ord=1),
    "mse_loss": lambda weight: F.mse_loss(weight, ZEROS, reduction="sum"),
    "L1Loss": lambda weight: nn.L1Loss(reduction="sum")(weight, ZEROS),
    "of a kept one": lambda weight: (FITS * (weight - weight.detach().clone() + 1).pow(2)).sum(),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_that_add_up_number_by_number_are_right_for_a_part(name):
    part, whole = square(), nn.Parameter(square().to_local().clone())
    for weight in (part, whole):
        (0.1 * PENALTIES[name](weight)).backward()
    assert torch.equal(part.grad, whole.grad)


@pytest.mark.parametrize("name", ["max", "norm", "std"])
def test_numbers_of_all_without_a_gradient_of_parts_are_refused_in_backward(name):
    number = square().norm(float("inf")) if name == "norm" else getattr(square(), name)()
    assert number.item() > 0, "to look at it does no harm"
    with pytest.raises(ModelError, match=rf"^{name} was given half of it; sums, means and norms of all"):
        number.backward()


def test_norms_of_zeros_have_zero_gradients():
    weight = square()
    with torch.no_grad():
        weight.zero_()
    (weight.norm() + weight.norm(3)).backward()
    assert not weight.grad.any()


def test_parts_that_lie_otherwise_are_not_put_together():
    one, other = square(), square()
    assert (one * other).sum() > 0
    otherwise = Half()
    otherwise.layout = "another half"
    guard(other, otherwise)
    with pytest.raises(ModelError, match=r"^mul was given half of it"):
        one * other


def test_what_was_computed_of_a_part_is_saved_as_a_plain_tensor():
    weight = square()
    for values in (weight.clone(), weight.data):
        loaded = pickle.loads(pickle.dumps(values))
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, weight.to_local())


@on_ranks(2)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_table_with_a_hook_of_its_gradient_is_not_split(register):
    model = build()
    getattr(model.words.weight, register)(lambda _: None)
    with pytest.raises(PlanError, match=r"splits 'words\.weight' by rows, but a hook is registered on it"):
        tulle.distribute(model, SGD(model.parameters(), lr=0.1), tulle.init(data=-1), plan="rows")


def became(weight):
    """Numbers of what loops make of weights outside of forward."""
    with torch.no_grad():
        average = weight.detach().clone().lerp_(weight, 0.5)
        found = (weight.exp() - 1).norm() + average.abs().mean() + torch.zeros_like(weight).add_(weight).std()
    data = weight.data
    both = torch.cat([data.flatten(), (data - 1).view(-1)]).norm() + torch.stack([data, 2 * data]).mean()
    return (
        found + both + data[data > 0.5].mean() + (data + 1).norm(dim=1).mean() + torch._foreach_sub([data], 1)[0].sum()
    )


PLACES_THAT_STAY_EMPTY = {
    "what became of it": became,
    "alike": lambda w: torch.tensor(float(torch.equal(w.data, w.data.abs()) or torch.allclose(w, w + 1))),
    "sum": lambda w: w.exp().sum(),
    "loss": lambda w: F.mse_loss(w, torch.ones_like(w), reduction="sum"),
    "mean": lambda w: w.cos().mean(),
    "norm": lambda w: (w + 1.0).norm(),
    "largest": lambda w: (w - 0.5).abs().neg().max(),
    "smallest": lambda w: (w + 9.0).min(),
    "equal": lambda w: (w.data == 0.5).sum(),
}


@on_ranks(2)
@pytest.mark.parametrize("name", PLACES_THAT_STAY_EMPTY)
def test_numbers_of_all_leave_out_places_without_a_row(name):
    mesh, rows = tulle.init(data=-1), 31
    torch.manual_seed(0)
    model, reference = (nn.Embedding(rows, WIDTH).double() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan={"weight": "rows"})
    split = split_of(model.weight)
    assert split is not None
    assert mesh.size * split.local_shape[0] > rows, "what is tested"
    for penalized in (model, reference):
        with torch.no_grad():
            penalized.weight.add_(0.5)
    found, expected = (PLACES_THAT_STAY_EMPTY[name](one.weight) for one in (model, reference))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


@on_ranks(2)
def test_a_number_is_given_the_dtype_of_a_part():
    """As the loop of sharpness-aware minimization has it."""
    model = build()
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), tulle.init(data=-1), plan="rows")
    for scale in (torch.ones(()), torch.ones(3)):
        assert scale.to(model.words.weight).dtype == scale.type_as(model.words.weight).dtype == torch.float64
