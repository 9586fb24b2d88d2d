"""The sharded softmax is `nn.Linear` and `nn.CrossEntropyLoss` on the batch of all ranks: loss and all gradients."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import tables
from tulle.comm import traffic
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.softmax import ShardedSoftmax
from tulle.softmax.part import Part
from tulle.softmax.tokens import Tokens

ROWS, WIDTH = 41, 6
IGNORED = 7
UNEVEN = (5, 0, 9, 3)
"""Tokens of each rank."""


def softmax_in_parts(axis: Axis, **options: object) -> tuple[ShardedSoftmax, ShardedSoftmax]:
    """A softmax whose table is split by rows over the axis, and the same with its table whole."""
    torch.manual_seed(1)
    whole = ShardedSoftmax(ROWS, WIDTH, **options).double()
    split = ShardedSoftmax(ROWS, WIDTH, **options).double()
    split.load_state_dict(whole.state_dict())
    rows = tables.RowSplit("words", ROWS, WIDTH, axis)
    split.weight.data = rows.take(whole.weight)
    tables.split.mark(split.weight, rows)
    return split, whole


def tokens_of(ranks: int, counts: tuple[int, ...] = UNEVEN, *, ignored: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and targets of each rank, the first `ignored` of each rank's not counting; alike on all ranks."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for count in counts[:ranks]:
        hidden = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
        target = torch.randint(ROWS, (count,), generator=generator)
        target[target == IGNORED] = 0
        target[:ignored] = IGNORED
        made.append((hidden, target))
    return made


def reference(softmax: ShardedSoftmax, hidden: Tensor, target: Tensor) -> Tensor:
    """The same loss from torch's own parts."""
    logits = F.linear(hidden, softmax.weight, softmax.bias)
    return F.cross_entropy(
        logits,
        target,
        ignore_index=softmax.ignore_index,
        label_smoothing=softmax.label_smoothing,
        reduction=softmax.reduction,
    )


def close(one: Tensor | None, other: Tensor | None, *, relative: float = 1e-12) -> None:
    assert one is not None
    assert other is not None
    scale = max(other.abs().max().item() if other.numel() else 0.0, 1e-3)
    difference = (one - other).abs().max().item() if other.numel() else 0.0
    assert difference <= relative * scale, f"off by {difference / scale:.2e}"


def check_against_one_process(axis: Axis, given: list[tuple[Tensor, Tensor]], **options: object) -> None:
    """Losses and all gradients of each rank, against torch's own layers on the tokens of all ranks."""
    split, whole = softmax_in_parts(axis, **options)
    logits_bytes = 8 * ROWS * 16
    split.logits_bytes = logits_bytes  # some chunks are kept and some are not
    own, target = given[axis.rank]
    own = own.clone().requires_grad_()
    weights = torch.linspace(0.5, 2, 4).double()  # each rank's loss counts differently
    loss = split(own, target)
    (loss.sum() * weights[axis.rank]).backward()

    states = [hidden.clone().requires_grad_() for hidden, _ in given]
    losses = [reference(whole, state, target) for state, (_, target) in zip(states, given, strict=True)]
    total = sum((one.sum() * weights[rank] for rank, one in enumerate(losses) if given[rank][1].ne(IGNORED).any()))
    (total / axis.size).backward()
    if target.ne(IGNORED).any():
        close(loss, losses[axis.rank])
        assert states[axis.rank].grad is not None
        close(own.grad, states[axis.rank].grad * axis.size)
    close(split.weight.grad, tables.split_of(split.weight).take(whole.weight.grad))
    if split.bias is not None:
        mean = tulle.sync.all_reduce(split.bias.grad.clone(), axis)  # the mean, as the engine takes it
        close(mean, whole.bias.grad)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_one_process_with_uneven_tokens(reduction, label_smoothing):
    axis = tulle.init(data=-1)["data"]
    given = tokens_of(axis.size, ignored=2)
    options = {"bias": True, "label_smoothing": label_smoothing, "reduction": reduction, "ignore_index": IGNORED}
    check_against_one_process(axis, given, **options)


@on_ranks(2, 4)
@pytest.mark.parametrize("fault", ["sum for mean", "largest log-sum", "what rank 0 found", "own rows"])
def test_a_fault_in_any_exchange_would_be_seen(fault):
    axis = tulle.init(data=-1)["data"]
    give_back, sum_back = Tokens.give_back, Tokens.sum_back
    with pytest.MonkeyPatch.context() as patch:
        if fault == "sum for mean":
            patch.setattr("tulle.softmax.shard.Shard.ranks", 1)
        if fault == "largest log-sum":
            patch.setattr(Tensor, "logsumexp", lambda found, dim: found.amax(dim))
        if fault == "what rank 0 found":
            patch.setattr(Tokens, "give_back", lambda self, every: give_back(self, every)[:1])
        if fault == "own rows":
            patch.setattr(Tokens, "sum_back", lambda self, make: sum_back(self, make) * 0 + make(self.rank))
        with pytest.raises(AssertionError, match="off by"):
            check_against_one_process(axis, tokens_of(axis.size, (4, 4, 4, 4)), bias=True)


@on_ranks(1, 2, 4)
def test_what_is_computed_again_is_what_was_kept():
    axis = tulle.init(data=-1)["data"]
    hidden, target = tokens_of(axis.size)[axis.rank]
    found = []
    for logits_bytes in (1, 8 * ROWS * 20, 2**30):
        split, _ = softmax_in_parts(axis)
        split.logits_bytes = logits_bytes
        state = hidden.clone().requires_grad_()
        split(state, target).nan_to_num().backward()
        found.append((state.grad, split.weight.grad))
    for of_hidden, of_weight in found[1:]:
        close(of_hidden, found[0][0])
        close(of_weight, found[0][1])


@on_ranks(2)
def test_a_rank_without_tokens_takes_part():
    axis = tulle.init(data=-1)["data"]
    check_against_one_process(axis, tokens_of(2, (6, 0)), reduction="sum")
    check_against_one_process(axis, tokens_of(2, (0, 6)), reduction="none")


@on_ranks(2, 3)
def test_a_table_smaller_than_the_ranks_works():
    axis = tulle.init(data=-1)["data"]
    torch.manual_seed(1)
    weight = torch.randn(2, WIDTH, dtype=torch.float64)
    softmax = ShardedSoftmax(2, WIDTH, label_smoothing=0.1).double()
    rows = tables.RowSplit("few", 2, WIDTH, axis)
    softmax.weight.data = rows.take(weight)
    tables.split.mark(softmax.weight, rows)
    hidden, target = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    close(softmax(hidden, target), F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1))


@on_ranks(2, 3)
def test_a_tied_table_gets_both_gradients():
    axis = tulle.init(data=-1)["data"]
    words = nn.Embedding(ROWS, WIDTH).double()
    rows = tables.RowSplit("words", ROWS, WIDTH, axis)
    torch.manual_seed(3)
    whole = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    words.weight.data = rows.take(whole)
    tables.split.mark(words.weight, rows)
    softmax = ShardedSoftmax(weight=words.weight)
    assert softmax.weight is words.weight
    assert [name for name, _ in nn.ModuleDict({"words": words, "softmax": softmax}).named_parameters()] == [
        "words.weight"
    ]
    words(torch.tensor([0, 1])).sum().backward()  # stands for what the run-time of split tables adds
    looked_up = words.weight.grad.clone()
    hidden, target = tokens_of(axis.size, (4, 4, 4))[axis.rank]
    softmax(hidden, target).backward()
    alone, _ = softmax_in_parts(axis)
    alone.weight.data = rows.take(whole)
    alone(hidden, target).backward()
    close(words.weight.grad, looked_up + alone.weight.grad)


@on_ranks(1, 2, 3)
def test_the_likeliest_classes_are_those_of_the_whole_table():
    axis = tulle.init(data=-1)["data"]
    split, whole = softmax_in_parts(axis, bias=True)
    hidden = tokens_of(axis.size, (5, 0, 3))[axis.rank][0].view(-1, 1, WIDTH)
    expected = F.linear(hidden, whole.weight, whole.bias).log_softmax(-1)
    close(split.log_prob(hidden), expected)
    values, rows = split.top_k(hidden, 4)
    close(values, expected.topk(4).values)
    assert torch.equal(rows, expected.topk(4).indices)
    assert torch.equal(split.predict(hidden), expected.argmax(-1))
    one = whole.weight[3]
    close(split.log_prob(one), F.linear(one, whole.weight, whole.bias).log_softmax(0))
    every_row = split.top_k(hidden, ROWS)[1].sort(-1).values
    assert torch.equal(every_row, torch.arange(ROWS).expand(*hidden.shape[:-1], ROWS))


@on_ranks(2, 4)
def test_rows_and_logits_do_not_travel():
    axis = tulle.init(data=-1)["data"]
    split, _ = softmax_in_parts(axis)
    tokens = 64
    hidden = torch.randn(tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(ROWS, (tokens,))
    split(hidden, target)  # the first call makes the lane
    traffic.take_labels()
    split(hidden, target).backward()
    sent = traffic.take_labels()["words"]
    # A head of three numbers, targets, hidden states and back, and four numbers a token.
    assert sent.bytes_sent == (axis.size - 1) * (24 + tokens * 8 * (1 + 2 * WIDTH + 4))


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_in_float32(dtype):
    axis = tulle.init(data=-1)["data"]
    split, whole = softmax_in_parts(axis, bias=True)
    split = split.float()
    tables.split.mark(split.weight, tables.RowSplit("words", ROWS, WIDTH, axis))
    hidden, target = tokens_of(axis.size, (9, 4))[axis.rank]
    rounded = hidden.to(dtype).float().requires_grad_()
    with torch.autocast("cpu", dtype):
        loss = split(rounded, target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert split.weight.grad.dtype == rounded.grad.dtype == torch.float32
    exact = whole.float()
    exact.weight.data = exact.weight.data.to(dtype).float()
    state = rounded.detach().clone().requires_grad_()
    expected = reference(exact, state, target)
    expected.backward()
    close(loss, expected, relative=1e-5)  # products of halves are exact in float32
    close(rounded.grad, state.grad, relative=2e-2)


@on_ranks(1)
def test_a_model_in_half_precision_gets_gradients_of_its_dtype():
    softmax = ShardedSoftmax(ROWS, WIDTH, bias=True).bfloat16()
    hidden = torch.randn(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    loss = softmax(hidden, torch.tensor([1, 2, 3]))
    loss.backward()
    gradients = [hidden.grad, softmax.weight.grad, softmax.bias.grad]
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3


def test_alone_no_process_group_is_needed_and_shapes_are_free():
    softmax = ShardedSoftmax(ROWS, WIDTH, reduction="none").double()
    hidden, target = torch.randn(2, 3, WIDTH, dtype=torch.float64), torch.randint(ROWS, (2, 3))
    losses = softmax(hidden, target)
    assert losses.shape == (2, 3)
    close(losses.flatten(), reference(softmax, hidden.flatten(0, 1), target.flatten()))


def test_parameters_of_a_linear_layer_are_taken_as_they_are():
    layer = nn.Linear(WIDTH, ROWS)
    values = copy.deepcopy(layer.state_dict())
    softmax = ShardedSoftmax(weight=layer.weight, bias=layer.bias)
    assert (softmax.weight, softmax.bias) == (layer.weight, layer.bias)
    softmax.reset_parameters()
    assert all(torch.equal(values[name], kept) for name, kept in softmax.state_dict().items())
    hidden, target = torch.randn(3, WIDTH), torch.randint(ROWS, (3,))
    torch.testing.assert_close(softmax(hidden, target), nn.functional.cross_entropy(layer(hidden), target))


def test_ignored_targets_have_no_loss_and_no_gradient():
    softmax = ShardedSoftmax(ROWS, WIDTH, reduction="none", ignore_index=IGNORED).double()
    hidden = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    losses = softmax(hidden, torch.tensor([1, IGNORED, 2, IGNORED]))
    losses.sum().backward()
    assert losses[[1, 3]].tolist() == [0, 0]
    assert hidden.grad[[1, 3]].abs().max() == 0
    softmax.reduction = "mean"
    assert softmax(hidden, torch.full((4,), IGNORED)).isnan(), "as torch says of a mean over nothing"


@pytest.mark.parametrize("tokens", [1, 50, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_take_the_memory_that_they_were_given(tokens, dtype):
    logits_bytes = 4 * ROWS * 100
    part = Part(torch.randn(ROWS, WIDTH).to(dtype), None, logits_bytes, {})
    largest_bytes = 0
    for chunk in part.chunks(slice(7, 7 + tokens)):
        hidden = torch.randn(chunk.stop - chunk.start, WIDTH).to(dtype)
        largest_bytes = max(largest_bytes, part.logits(hidden).nbytes)
        part.look(chunk, hidden, is_kept=True)
    kept_bytes = sum(kept.nbytes for kept in part.kept.values())
    assert largest_bytes + kept_bytes <= logits_bytes
    assert kept_bytes >= min(tokens * ROWS * dtype.itemsize, logits_bytes / 4), "and it is used"


def test_a_graph_that_is_retained_gives_the_same_gradients_again():
    softmax = ShardedSoftmax(ROWS, WIDTH, bias=True, label_smoothing=0.1).double()
    hidden = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = softmax(hidden, torch.randint(ROWS, (4,)))
    first = torch.autograd.grad(loss, [hidden, softmax.weight, softmax.bias], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, [hidden, softmax.weight, softmax.bias]), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_the_gradient_is_refused():
    softmax = ShardedSoftmax(ROWS, WIDTH)
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(ModelError, match="create_graph=True, but that of a sharded softmax has no gradient of its own"):
        torch.autograd.grad(softmax(hidden, torch.randint(ROWS, (4,))), hidden, create_graph=True)


def test_what_is_kept_for_backward_goes_with_it():
    softmax = ShardedSoftmax(ROWS, WIDTH)
    loss = softmax(torch.randn(4, WIDTH), torch.randint(ROWS, (4,)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_table_that_was_written_before_backward_is_refused():
    softmax = ShardedSoftmax(ROWS, WIDTH)
    loss = softmax(torch.randn(4, WIDTH), torch.randint(ROWS, (4,)))
    with torch.no_grad():
        softmax.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_table_and_frozen_states_get_no_gradient():
    softmax = ShardedSoftmax(ROWS, WIDTH, bias=True)
    softmax.weight.requires_grad_(requires_grad=False)
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    softmax(hidden, torch.randint(ROWS, (4,))).backward()
    assert softmax.weight.grad is None
    assert softmax.bias.grad is not None
    softmax.weight.requires_grad_()
    softmax(hidden.detach(), torch.randint(ROWS, (4,))).backward()
    assert softmax.weight.grad is not None


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target": torch.tensor([0, ROWS, 1])},
            f"was given the target {ROWS}, expected 0..{ROWS - 1} or ignore_index",
        ),
        ({"target": torch.tensor([0.0, 1.0, 2.0])}, "targets in torch.float32, expected class numbers in int64"),
        ({"target": torch.tensor([0, 1])}, r"shape [3, 6] and targets of shape [2], expected [..., width] and [...]"),
        ({"hidden": torch.zeros(3, 5, dtype=torch.float64)}, "width 5 in torch.float64, expected width 6"),
        ({"hidden": torch.zeros(3, 6)}, "in torch.float32, expected width 6 in torch.float64: cast them"),
    ],
)
def test_what_does_not_fit_on_one_rank_is_told_on_all(change, message):
    axis = tulle.init(data=-1)["data"]
    split, _ = softmax_in_parts(axis)
    given = {"hidden": torch.zeros(3, WIDTH, dtype=torch.float64), "target": torch.tensor([0, 1, 2])}
    if axis.rank == axis.size - 1:
        given |= change
    with pytest.raises(ModelError, match=re.escape(message)):
        split(**given)


@on_ranks(2)
def test_a_table_that_is_split_by_columns_is_refused():
    axis = tulle.init(data=-1)["data"]
    softmax = ShardedSoftmax(ROWS, WIDTH)
    tables.split.mark(softmax.weight, tables.ColumnSplit("words", ROWS, WIDTH, axis))
    with pytest.raises(ModelError, match="'words' needs whole rows, but that table is split by columns"):
        softmax(torch.zeros(1, WIDTH), torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give it either both numbers, or a parameter as weight"),
        ({"num_rows": 4}, "give it either both numbers, or a parameter as weight"),
        (
            {"num_rows": 4, "width": 2, "weight": nn.Parameter(torch.zeros(4, 2))},
            "either both numbers, or a parameter as weight",
        ),
        ({"weight": torch.zeros(4, 2)}, "weight=Tensor: give it either both numbers, or a parameter as weight"),
        ({"num_rows": nn.Parameter(torch.zeros(4, 2))}, "given num_rows=Parameter, width=None and weight=None: give"),
        ({"num_rows": 4, "width": 2, "bias": torch.zeros(4)}, "a Tensor of shape [4] as bias, expected a parameter"),
        (
            {"num_rows": 4, "width": 2, "bias": nn.Parameter(torch.zeros(2))},
            "as bias, expected a parameter of shape [4]",
        ),
        ({"num_rows": -4, "width": 2}, "a table of shape [-4, 2], expected [num_rows, width]"),
        ({"num_rows": 4, "width": 2.0}, "a table of shape [4, 2.0], expected [num_rows, width]"),
        ({"weight": nn.Parameter(torch.zeros(4))}, "a table of shape [4], expected [num_rows, width]"),
        ({"num_rows": 4, "width": 2, "reduction": "max"}, "reduction='max'"),
        ({"num_rows": 4, "width": 2, "label_smoothing": 2.0}, "label_smoothing=2.0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        ShardedSoftmax(**options)
