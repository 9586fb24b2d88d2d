"""`Bound`: what no plan of a mesh can be faster than, whatever is cut, split or sent otherwise: for branch and bound.

A device works on its share of all pieces, at best split where that is faster, and updates them; a link reduces their
dense gradients, and, if updates do not wait for reads, not before the last backward has begun. Of stages the busiest
has at least as much to do as that of the best cut; and if each piece reads the one before, a stage begins when those
before it have had a micro-batch, and they end after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tulle.memory import Memory
from tulle.memory.options import HOST
from tulle.plan.crowding import Crowding
from tulle.plan.deal import LOOKUP_CALLS, MESSAGES
from tulle.plan.plan import AT_READ, MODEL, Plan
from tulle.plan.sharing import sharers
from tulle.plan.table_plan import TablePlan
from tulle.plan.update import dense_s_per_byte, rest_s
from tulle.plan.work import DATA, NARROW, Share, Work, total_s, work_of
from tulle.workload import Cluster, ModuleProfile, Profile

_HALVINGS = 20
"""Of what is not known of a best cut: a millionth of it is left."""


@dataclass(slots=True)
class Bound:
    """Lower bounds for one model on one cluster; it remembers how well each pipeline can be cut.

    Args:
        profile: Of the model.
        cluster: What it runs on.
        puts_off: Whether gradients of weights may be put off to where a rank would wait.
    """

    profile: Profile
    cluster: Cluster
    puts_off: bool = False
    _known: dict[object, float] = field(default_factory=dict)
    _kept: dict[object, list[Work]] = field(default_factory=dict)
    _is_connected: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_connected = is_connected(self.profile.modules)

    def seconds(self, share: Share, memory: Memory, schedule: str, *, is_sharp: bool = True) -> float:
        """What no plan takes less than.

        Args:
            share: How the step is dealt.
            memory: What is shared out; what is recomputed does not count.
            schedule: When replicas are updated.
            is_sharp: Whether to find the best cut into stages, which takes longer than to take their mean.
        """
        key = (*share.mesh.items(), share.micro_batches, memory, schedule, is_sharp)
        if key not in self._known:
            self._known[key] = self._seconds(share, memory, schedule, is_sharp=is_sharp)
        return self._known[key]

    def _seconds(self, share: Share, memory: Memory, schedule: str, *, is_sharp: bool) -> float:
        pieces, count = self.pieces(share), share.micro_batches
        updates_s, reduced_s = self._updates(share, memory), self._reduced(share, memory)
        device_s = [count * total_s(piece) + updated for piece, updated in zip(pieces, updates_s, strict=True)]
        link_s = reduced_s
        if schedule != AT_READ:  # buckets are full in the last backward, and the update waits for them
            link_s = [
                count * piece.forward_s + (count - 1) * piece.backward_s + reduced + updated
                for piece, reduced, updated in zip(pieces, reduced_s, updates_s, strict=True)
            ]
        working_s, sending_s = (_least_maximum(one, share.pipe, is_sharp=is_sharp) for one in (device_s, link_s))
        calls_s = self._calls_s(share)
        messages_s = self._messages_s(share, pieces)
        is_behind_lookups = share.pipe == 1 and schedule != AT_READ
        busiest_s = max(
            working_s + count * (calls_s + messages_s), sending_s + (count * calls_s if is_behind_lookups else 0.0)
        )
        turns_s = [max(0.0, total_s(piece) - self.puts_off * piece.weights_s) for piece in pieces]
        through_s = sum(turns_s)  # of one micro-batch
        if self._is_chain:
            through_s = _least_passage(turns_s, share.pipe, count, is_sharp=is_sharp)
        rest = rest_s(self.profile, share)
        least_s, crowding = max(busiest_s, through_s + calls_s) + rest, Crowding.of(self.cluster.machine, share.mesh)
        if crowding is None:
            return least_s
        # With axis `model` a piece's seconds hold sums that it waits for.
        mean_s = sum(device_s) / share.pipe + count * (calls_s + messages_s) + rest if share.model == 1 else 0.0
        return max(crowding.least * least_s, crowding.least_mean * mean_s)

    def once_s(self, share: Share, memory: Memory) -> dict[str, float]:
        """By piece, what is done once a step: its update, and the sum of its gradients."""
        both = zip(self.pieces(share), self._updates(share, memory), self._reduced(share, memory), strict=True)
        return {piece.name: updated_s + reduced_s for piece, updated_s, reduced_s in both}

    def _calls_s(self, share: Share) -> float:
        """What each rank takes to run a micro-batch past all modules that are placed, if they are as few as can be.

        Of axis `model` it could do so while it waits for sums. Without stages it takes what lookups do in tables whose
        gradients are sparse: their rows travel, split or not.
        """
        if share.pipe == 1:
            sparse = sum(table.is_sparse for table in self.profile.tables) if share.data > 1 else 0
            return LOOKUP_CALLS * self.cluster.machine.call_s * sparse
        if share.model > 1:
            return 0.0
        placed = {next((outer for outer in one.around if outer), one.name) for one in self.profile.modules}
        return len(placed) * self.cluster.machine.call_s + self.cluster.machine.micro_batch_s

    def _messages_s(self, share: Share, pieces: Sequence[Work]) -> float:
        """What a stage sends and hears at least of a micro-batch; where one has everything, that computes all."""
        if share.pipe == 1 or share.model > 1 or not self._is_connected:
            return 0.0
        others_s = (1 - 1 / share.pipe) * sum(map(total_s, pieces))
        return min(2 * MESSAGES * self.cluster.machine.micro_batch_s, others_s)

    @property
    def _is_chain(self) -> bool:
        """Whether each stage needs the one before, wherever the model is cut."""
        return all(before.name in piece.reads for before, piece in pairwise(self.profile.modules))

    def _updates(self, share: Share, memory: Memory) -> list[float]:
        """Seconds of the optimizer for each piece."""
        network = share.network(DATA, self.cluster, self.profile)
        step_s = dense_s_per_byte(self.profile, sharers(memory, network, share.data))
        return [piece.parameters_bytes * step_s for piece in self.pieces(share)]

    def _reduced(self, share: Share, memory: Memory) -> list[float]:
        """Seconds of the link for the dense gradients of each piece, without latency.

        Of those that hosts share out only parts travel between hosts, beside what goes within them: nothing, at least.
        """
        if share.data == 1 or memory.full_shard == HOST:
            return [0.0] * len(self.profile.modules)
        network = share.network(DATA, self.cluster, self.profile)
        narrow = NARROW if memory.precision else 1.0
        rate = network.all_reduce_bytes_per_s or network.bandwidth_bytes_per_s
        sent = 2 * (share.data - 1) / share.data * narrow / rate
        return [piece.parameters_bytes * sent for piece in self.pieces(share)]

    def pieces(self, share: Share) -> list[Work]:
        """Each piece as it would be at its best."""
        key = share.model, share.data, share.scale
        if key not in self._kept:
            self._kept[key] = best_pieces(self.profile, self.cluster, share)
        return self._kept[key]


def is_connected(pieces: Sequence[ModuleProfile]) -> bool:
    """Whether any part of a model reads what the rest makes, or is read by it: then each stage is sent something.

    Example:
        >>> first, second = ModuleProfile("a", 1.0, 1.0), ModuleProfile("b", 1.0, 1.0, reads={"a": 8})
        >>> is_connected([first, second]), is_connected([first, replace(second, reads={})])
        (True, False)
    """
    group = {piece.name: piece.name for piece in pieces}
    for piece in pieces:
        joined = {group[one] for one in (piece.name, *piece.reads) if one in group}
        group = {name: piece.name if one in joined else one for name, one in group.items()}
    return len(set(group.values())) == 1


def _least_maximum(seconds: list[float], stages: int, *, is_sharp: bool) -> float:
    """What the busiest of some stages has at least to do, whatever is cut where; their mean if it need not be sharp."""
    mean_s = sum(seconds) / stages
    if stages == 1 or not is_sharp:
        return mean_s
    low, high = max(mean_s, *seconds), mean_s + max(seconds)
    if _stages_of(seconds, low) <= stages:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _stages_of(seconds, middle) > stages else (low, middle)
    return low


def _least_passage(turns_s: list[float], stages: int, count: int, *, is_sharp: bool) -> float:
    """What micro-batches take at least through stages that follow each other, whatever is cut where.

    Stage s begins after one turn of each stage before it, and they end after it: with t_s seconds a turn it takes
    `t_1 + .. + t_(s-1) + count t_s`. If none may take more than X, and pieces could be cut anywhere, s stages would get
    through `X (1 - (1 - 1 / count)^s)` of a turn at most.
    """
    low = sum(turns_s) / (1 - (1 - 1 / count) ** stages)
    if stages == 1 or not is_sharp:
        return low
    high = low + count * max(turns_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_passage(turns_s, stages, count, middle) else (middle, high)
    return low


def _is_passage(turns_s: list[float], stages: int, count: int, most_s: float) -> bool:
    """Whether pieces can be cut so that no stage takes longer than that, as each takes as many as it may."""
    stage, before_s, passed_s = 1, 0.0, 0.0
    for turn_s in turns_s:
        if before_s + count * (passed_s + turn_s - before_s) > most_s:
            stage, before_s = stage + 1, passed_s
            if before_s + count * turn_s > most_s:  # not even one piece
                return False
        passed_s += turn_s
    return stage <= stages


def _stages_of(seconds: list[float], most_s: float) -> int:
    """Into how many stages pieces must be cut so that none has more to do."""
    stages, filled_s = 1, 0.0
    for time_s in seconds:
        if filled_s + time_s > most_s:
            stages, filled_s = stages + 1, 0.0
        filled_s += time_s
    return stages


def best_pieces(profile: Profile, cluster: Cluster, share: Share) -> list[Work]:
    """Each piece as it would be at its best: whole or split, what takes less of either, and its tables elsewhere."""
    network = share.network(MODEL, cluster, profile)
    tables = tuple(TablePlan(t.name, t.rows, t.width, t.placements[0]) for t in profile.tables if t.placements)
    whole = work_of(Plan({DATA: 1}, tables), profile, share, network)
    if share.model == 1:
        return whole
    split = work_of(Plan({DATA: share.data, MODEL: share.model}, tables), profile, share, network)
    return [_least(*pair) for pair in zip(whole, split, strict=True)]


def _least(whole: Work, split: Work) -> Work:
    """Of each number the smaller one: forward is at its best, and so are both ways together."""
    forward_s = min(work.forward_s + work.all_reduced.seconds for work in (whole, split))
    both_s = min(total_s(work) for work in (whole, split))
    parameters_bytes = min(whole.parameters_bytes, split.parameters_bytes)
    backward_s = both_s - forward_s
    return replace(whole, forward_s=forward_s, backward_s=backward_s, parameters_bytes=parameters_bytes)
