"""The partition: exact beside brute force, within memory, obeying pins; and from a profile of a real model."""

import inspect
import itertools
import math
import re
from xml.etree import ElementTree

import pytest
import torch
from beside_one_process import data, loss_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_networks import WIDTH, Chain, TiedEnds, Translator, compare, make
from pipeline_profiled import Calling, Forces, Glancing, Handing, Reversible
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import PlanError
from tulle.pipeline import Limits, Piece, partition, picture, pins_of
from tulle.pipeline.calls import pieces_of, watch
from tulle.pipeline.partition import COPIES, _Search
from tulle.pipeline.profile import profile

SLOWLY = Limits(bytes_per_s=100.0)
TIMES = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def takes_s(part: list[tuple[int, Piece]], bytes_per_s: float) -> float:
    """What a stage takes: its pieces, and what comes to them from before."""
    largest: dict[int, int] = {}
    for _, piece in part:
        for source, size in (piece.incoming or {}).items():
            if source < part[0][0]:
                largest[source] = max(size, largest.get(source, 0))
    return sum(piece.time_s for _, piece in part) + 2 * sum(largest.values()) / bytes_per_s


def by_force(pieces: list[Piece], stages: int, memory: int | None, bytes_per_s: float = math.inf) -> float:
    """The slowest stage of the best of all contiguous partitions, or infinity."""
    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(len(pieces) + 1), stages - 1):
        ends = [0, *cuts, len(pieces)]
        parts = [pieces[a:b] for a, b in itertools.pairwise(ends)]
        needs = [
            COPIES * sum(p.parameter_bytes for p in part) + (stages - k) * sum(p.activation_bytes for p in part)
            for k, part in enumerate(parts)
        ]
        if memory is None or max(needs) <= memory:
            numbered = [list(enumerate(part, a)) for a, part in zip(ends, parts, strict=False)]
            best = min(best, max(takes_s(part, bytes_per_s) for part in numbered))
    return best


@settings(max_examples=100)
@given(TIMES, st.integers(1, 4), st.data())
def test_no_contiguous_partition_is_better(times, stages, data):
    order = range(len(times))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
    reads = [
        data.draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, 9), max_size=2)) if n else {} for n in order
    ]
    pieces = [Piece(f"m{n}", float(times[n]), sizes[n], 5 - sizes[n], reads[n]) for n in order]
    memory = data.draw(st.none() | st.integers(0, 120))
    bytes_per_s = data.draw(st.sampled_from([math.inf, 2.0]))
    expected = by_force(pieces, stages, memory, bytes_per_s)
    if expected == math.inf:
        with pytest.raises(PlanError, match="no partition of"):
            partition(pieces, stages, Limits(memory, bytes_per_s))
        return
    found = partition(pieces, stages, Limits(memory, bytes_per_s))
    assert max(found.times_s) == expected
    assert list(found.stages) == sorted(found.stages)
    assert memory is None or max(found.memory_bytes) <= memory


def test_the_check_by_force_would_notice_a_worse_one():
    pieces = [Piece("a", 1.0), Piece("b", 3.0), Piece("c", 1.0)]
    assert by_force(pieces, 2, None) == 4.0 < 5.0


def test_the_work_of_a_partition_grows_with_the_pieces_not_with_their_square(monkeypatch):
    looked_at = []
    given = _Search._stage_time
    monkeypatch.setattr(_Search, "_stage_time", lambda *stage: looked_at.append(stage) or given(*stage))
    for count in (400, 800):
        partition([Piece(f"m{n}", 1.0 + n % 7, incoming={n - 1: 100} if n else {}) for n in range(count)], 4, SLOWLY)
        assert len(looked_at) < 40 * count
        looked_at.clear()


def test_bytes_across_a_cut_count():
    wide = Piece("wide", 1.0), Piece("reads", 1.0, incoming={0: 10}), Piece("last", 1.0, incoming={1: 1})
    assert partition(wide, 2, Limits(bytes_per_s=20.0)).stages == (0, 0, 1)


def test_pins_hold_in_order_and_out_of_it():
    pieces = [Piece(name, 1.0) for name in "abcdef"]
    assert partition(pieces, 3, Limits(pins={"b": 1, "c": 1})).stages[1:3] == (1, 1)
    out_of_order = partition(pieces, 3, Limits(pins={"a": 2, "f": 0}))
    assert (out_of_order.stages[0], out_of_order.stages[5]) == (2, 0)
    assert max(out_of_order.times_s) == 2.0
    with pytest.raises(PlanError, match="'z': 0"):
        partition(pieces, 3, Limits(pins={"z": 0}))


def test_modules_are_pinned_where_they_are_made():
    with pipeline.stage(1):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        with pipeline.stage(0):
            model.append(torch.nn.Linear(1, 1))
            model[0].inner = torch.nn.Sequential()
        model[0].inner.append(torch.nn.ReLU())
    assert pins_of(model) == {"0": 1, "0.inner": 0, "0.inner.0": 1, "1": 1, "2": 0}


@pytest.mark.parametrize("number", [-1, "encoder", None])
def test_a_stage_that_is_no_number_is_refused(number):
    with pytest.raises(PlanError, match=f"stage was given {number!r}, expected the number of a stage"):
        pipeline.stage(number).__enter__()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_profile_deals_all_modules(is_deferred):
    mesh = tulle.init(pipe=-1)
    x = torch.randn(64, WIDTH)
    torch.manual_seed(0)
    model = Chain(6)
    if is_deferred:
        with tulle.deferred_init():
            model = Chain(6)
    dealt = pipeline.deal(model, x, mesh["pipe"])
    assert [piece.name for piece in dealt.partition.pieces] == [f"layers.{n}" for n in range(6)]
    assert all(piece.time_s > 0 for piece in dealt.partition.pieces)
    assert dealt.partition.pieces[3].incoming == {2: 64 * WIDTH * 4}
    assert [line.split()[0] for line in dealt.partition.table().splitlines()[1:]] == [str(s) for s in range(mesh.size)]
    assert all(parameter.grad is None for parameter in model.parameters())
    pinned = pipeline.deal(model, x, mesh["pipe"], pins={"layers.0": mesh.size - 1})
    assert pinned.partition.assignment["layers.0"] == mesh.size - 1


@on_ranks(1, 2)
def test_a_pin_on_a_later_stage_says_how_many_there_are():
    mesh = tulle.init(pipe=-1)
    dealt = pipeline.deal(Chain(6), torch.randn(4, WIDTH), mesh["pipe"], pins={"layers.3": 2, "layers.5": 3})
    assert dealt.partition.count == 4
    assert (dealt.assignment["layers.3"], dealt.assignment["layers.5"]) == (2, 3)


class Tied(torch.nn.Module):
    """A module that reads its child's weight, as attention does, and one that reads another's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.nn.functional.linear(hidden, self.words.weight)


@on_ranks(1)
def test_a_deferred_model_is_profiled_whose_modules_read_weights_of_others():
    """They were lent to their own module only, and refused elsewhere; and counted as activations, if backward reads."""
    mesh = tulle.init(pipe=1)
    ids = torch.arange(24).reshape(6, 4)
    with tulle.deferred_init():
        model = Tied()
    of_deferred, _ = profile(model, ids, mesh["pipe"], stages=10**6)  # cut as far as can be, whatever the times
    of_real, _ = profile(Tied(), ids, mesh["pipe"], stages=10**6)
    looks = [
        [(piece.name, piece.incoming, piece.activation_bytes) for piece in pieces] for pieces in (of_deferred, of_real)
    ]
    assert looks[0] == looks[1]
    assert all(parameter.is_meta for parameter in model.parameters())


class BothEnds(torch.nn.Module):
    """One dropout before and after the layers, as encoders and decoders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layers = torch.nn.Dropout(), torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


@on_ranks(1)
def test_what_has_no_state_and_is_called_twice_has_no_stage():
    """It runs where its arguments live: at a stage of its own, values would go there and back."""
    mesh = tulle.init(pipe=1)
    dealt = pipeline.deal(BothEnds(), torch.ones(32, 64), mesh["pipe"], stages=2)
    assert [piece.name for piece in dealt.partition.pieces] == [f"layers.{number}" for number in range(4)]
    assert set(dealt.assignment) == {f"layers.{number}" for number in range(4)}


class Turning(torch.nn.Module):
    """Has buffers, as positions that all layers turn by do, or a weight, as those that they are biased by do."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(4))
        self.weight = torch.nn.Parameter(torch.ones(4)) if is_trained else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles if self.weight is None else x * self.weight


class Attending(torch.nn.Module):
    def __init__(self, turning: Turning) -> None:
        super().__init__()
        self.query, self.turning = torch.nn.Linear(4, 4), turning

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turning(self.query(x))


class Layer(torch.nn.Module):
    def __init__(self, turning: Turning) -> None:
        super().__init__()
        self.attention, self.out = Attending(turning), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x))


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_module_that_layers_share_is_no_piece_where_another_piece_calls_it(is_trained):
    """As in torchtune: of layers that weigh alike, the clock takes the first for heavier, and cuts it."""
    turning = Turning(is_trained=is_trained)
    model = torch.nn.Sequential(*(Layer(turning) for _ in range(3)))
    calls = watch(model, (torch.ones(2, 4),), {})
    weights = dict.fromkeys(calls.chains, 0.5) | {"0": 2.0, "0.attention": 1.5}
    assert pieces_of(model, calls, weights, 1.0) == ["0.attention", "0.out", "1", "2"]
    calls.borrowers.add("0.attention")  # it cannot be whole: then no layer is
    cut = [
        "0.attention.query",
        "0.attention.turning",
        "0.out",
        "1.attention.query",
        "1.out",
        "2.attention.query",
        "2.out",
    ]
    assert pieces_of(model, calls, weights, 1.0) == cut


@on_ranks(1)
def test_what_calls_modules_in_a_function_of_autograd_stays_whole():
    pieces, _ = profile(make(Reversible), torch.ones(2, WIDTH, dtype=torch.float64), tulle.init(pipe=1)["pipe"], 8)
    assert [piece.name for piece in pieces] == ["first", "body", "last"]


@on_ranks(1)
def test_layers_that_are_handed_a_module_with_buffers_are_cut_for_it_lives_at_one_stage():
    pieces, _ = profile(make(Handing), torch.ones(2, WIDTH, dtype=torch.float64), tulle.init(pipe=1)["pipe"], 1)
    assert [piece.name for piece in pieces] == ["offsets", *(f"layers.{number}.linear" for number in range(4))]


@on_ranks(1)
def test_what_a_forward_hooks_for_a_while_is_cut():
    x, axis = torch.ones(2, WIDTH, dtype=torch.float64), tulle.init(pipe=1)["pipe"]
    dealt = pipeline.deal(make(Glancing), x, axis, stages=2, pins={"teacher": 0, "student": 1})
    assert dealt.assignment == {"teacher.0": 0, "teacher.1": 0, "student": 1}


@on_ranks(1)
def test_a_model_that_has_a_call_of_its_own_is_cut():
    pieces, _ = profile(make(Calling), torch.ones(2, WIDTH, dtype=torch.float64), tulle.init(pipe=1)["pipe"], 1)
    assert [piece.name for piece in pieces] == ["first", "second", "last"]


@on_ranks(1)
def test_what_differentiates_by_transforms_is_weighed_by_what_it_leaves():
    pieces, _ = profile(make(Forces), torch.ones(8, WIDTH, dtype=torch.float64), tulle.init(pipe=1)["pipe"], 8)
    bytes_of = {piece.name: piece.activation_bytes for piece in pieces}
    assert 8 * WIDTH * 8 <= bytes_of["1"] == bytes_of["3"] <= 40 * WIDTH * WIDTH * 8


@on_ranks(2)
def test_a_model_that_is_dealt_by_profile_trains_as_on_one_process():
    mesh = tulle.init(pipe=-1)
    for kind in (Translator, TiedEnds):
        sample = torch.randn(3, WIDTH, dtype=torch.float64)
        assignment = dict(pipeline.deal(make(kind), sample, mesh["pipe"]).assignment)
        assert set(assignment.values()) == {0, 1}
        assert compare(kind, mesh, assignment) < 1e-14


@on_ranks(2)
def test_a_sample_that_does_not_fit_the_model_is_refused_on_all_ranks():
    mesh = tulle.init(pipe=-1)
    said = (
        rf"could not be profiled on the sample, because .* \({re.escape(inspect.getfile(Chain))}:\d+, in forward\)\. "
    )
    with pytest.raises(PlanError, match=said) as refused:
        pipeline.deal(Chain(), torch.zeros(2, WIDTH + 1), mesh["pipe"])
    assert isinstance(refused.value.__cause__, RuntimeError)
    with pytest.raises(PlanError, match=r"sample= holds no samples \(of shape \[0, 6\]\)"):
        pipeline.deal(Chain(), torch.zeros(0, WIDTH), mesh["pipe"])


def test_the_picture_has_a_box_for_each_piece_and_a_frame_for_each_pin():
    pieces = [Piece("embed", 1.0, 10), Piece("block<1>", 2.0), Piece("block2", 2.0), Piece("head", 3.0)]
    found = partition(pieces, 2, Limits(pins={"block2": 1}))
    drawn = ElementTree.fromstring(picture(found))
    boxes = [box for box in drawn if box.tag.endswith("rect")]
    assert [box[0].text.split(":")[0] for box in boxes] == ["embed", "block<1>", "block2", "head"]
    assert [box[0].text.split(":")[0] for box in boxes if box.get("stroke-width") == "3"] == ["block2"]
    assert float(boxes[1].get("width")) == pytest.approx(2 * float(boxes[0].get("width")), abs=0.2)
    assert "block2*" in found.table()


class Stretched(torch.nn.Module):
    """A layer to be cut, which computes of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 8 * WIDTH), torch.nn.Linear(8 * WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.zeros(8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh() * self.scale.exp())


class Checkpointed(torch.nn.Module):
    """Runs such layers again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Stretched() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_a_profile_lets_go_of_what_is_checkpointed_around_modules():
    mesh = tulle.init(pipe=-1)
    model = pipeline.place(make(Checkpointed), mesh["pipe"], sample=data(4), stages=8)
    step = pipeline.step(micro_batches=2)(loss_of)
    expected = step(make(Checkpointed), data()).stack()
    torch.testing.assert_close(step(model, data()).stack(), expected, rtol=1e-12, atol=0)
