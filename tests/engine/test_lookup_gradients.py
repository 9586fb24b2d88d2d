"""What bags of many lookups take of fetched rows, and its gradients, are those of torch's function."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tulle.engine import lookup_gradients
from tulle.engine.lookup_gradients import pooled

ROWS, WIDTH, MANY = 700, 5, 5000


@pytest.fixture
def mine(monkeypatch):
    """Counts the backwards in which gradients are added up here."""
    seen: list[str] = []
    own = lookup_gradients._Pooled.backward
    noting = staticmethod(lambda ctx, *given: seen.append("_Pooled") or own(ctx, *given))
    monkeypatch.setattr(lookup_gradients._Pooled, "backward", noting)
    return seen


def compare(theirs, ours, dtype=torch.float64):
    """How far results and gradients are apart, two backwards through one graph."""
    torch.manual_seed(0)
    rows, result = torch.randn(ROWS, WIDTH, dtype=dtype), []
    for lookup in (theirs, ours):
        leaf = nn.Parameter(rows.clone())
        found = lookup(leaf)
        weights = torch.linspace(-1, 1, found.numel(), dtype=dtype).view(found.shape)
        for _ in range(2):
            (found * weights).sum().backward(retain_graph=True)
        result.append((found.detach(), leaf.grad))
    return max((one - other).abs().max().item() for one, other in zip(*result, strict=True))


def starts(*, has_last: bool) -> torch.Tensor:
    """Of bags of many sizes, some of them empty."""
    ends = torch.randint(0, 20, (400,)).cumsum(0).clamp(max=MANY)
    ends[-1] = MANY
    return torch.cat([ends.new_zeros(1), ends]) if has_last else torch.cat([ends.new_zeros(1), ends[:-1]])


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("bags", ["rows", "offsets", "last offset"])
def test_bags_and_their_gradients(padding, mode, bags, mine):
    ids = torch.randint(ROWS // 2, (500, 10) if bags == "rows" else (MANY,))
    offsets = None if bags == "rows" else starts(has_last=bags == "last offset")
    options = {"mode": mode, "include_last_offset": bags == "last offset", "padding_idx": padding}
    apart = compare(lambda w: F.embedding_bag(ids, w, offsets, **options), lambda w: pooled(ids, w, offsets, **options))
    assert apart < 1e-13
    assert mine == ["_Pooled"] * 2


def test_all_may_be_padding(mine):
    nothing = torch.full((512, 10), 3)
    options = {"mode": "mean", "padding_idx": 3}
    assert compare(lambda w: F.embedding_bag(nothing, w, **options), lambda w: pooled(nothing, w, **options)) == 0
    assert mine == ["_Pooled"] * 2


def test_what_is_not_added_up_here_is_torchs(mine):
    ids, weights = torch.randint(ROWS, (500, 10)), torch.rand(500, 10, dtype=torch.float64)
    few = torch.randint(ROWS, (40, 10))
    for given, options in ((ids, {"mode": "max"}), (ids, {"mode": "sum", "per_sample_weights": weights}), (few, {})):
        apart = compare(
            lambda w, given=given, options=options: F.embedding_bag(given, w, **options),
            lambda w, given=given, options=options: pooled(given, w, **options, padding_idx=None),
        )
        assert apart == 0
    assert not mine


def test_halves_are_added_up_in_single_precision(mine):
    ids = torch.zeros(1024, 8, dtype=torch.int64)
    row = nn.Parameter(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    pooled(ids, row, mode="sum", padding_idx=None).sum().backward()
    assert row.grad.eq(8192).all(), "in bfloat16 it would stop at 256"
    assert mine == ["_Pooled"]
