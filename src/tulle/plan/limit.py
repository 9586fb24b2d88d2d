"""`least_seconds`: what a step under a plan takes at least, told from its deal alone: most plans need not be lowered.

    link     |fetch|              |sync 1|  |sync 2|
    device         F0 F1 .. | B0  B1 ..               update  rest
             start                          last backward     tail

A device does all that it has to do, and a link too. Between a stage's first forward and its last backward lies all its
work; before it, what stages before it do of one micro-batch, and behind it the same backward. What is sent as the last
backward goes on waits for its gradient and for the link, and the update waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tulle.cost import all_reduce_cost
from tulle.pipeline.schedule import checked, is_split
from tulle.plan.bundle import Bundle
from tulle.plan.crowding import Crowding
from tulle.plan.deal import Deal
from tulle.plan.sharing import gather_cost
from tulle.plan.update import rest_s
from tulle.plan.work import Work, total_s


def least_seconds(deal: Deal) -> float:
    """A lower bound of what `lower` and the simulator say of it, whatever the size of its buckets.

    Args:
        deal: Of a plan whose stages follow each other.
    """
    stages = [_Stage.of(deal, number) for number in range(deal.stages)]
    least_s, crowding = _uncrowded_s(deal, stages), Crowding.of(deal.machine, deal.share.mesh)
    if crowding is None:
        return least_s
    mean_s = sum(stage.computed_s for stage in stages) / deal.share.pipe + rest_s(deal.profile, deal.share)
    return max(crowding.least * least_s, crowding.least_mean * mean_s)


def _uncrowded_s(deal: Deal, stages: Sequence[_Stage]) -> float:
    """The same if all ranks always took what they take while all compute."""
    rest = rest_s(deal.profile, deal.share)
    busy_s = [0.0]
    for rank in range(deal.share.pipe):
        of_rank = stages[rank :: deal.share.pipe]
        busy_s += [sum(stage.device_s for stage in of_rank) + rest, sum(stage.link_s for stage in of_rank)]
    if deal.is_late:  # a step may begin while links work for the one before
        return max(busy_s)
    begins_s, tails_s = _begins(deal, stages), _tails(deal, stages)
    if is_split(checked(deal.plan.pipeline_schedule)):  # others do not wait for whole backwards
        turned_s = [deal.share.micro_batches * stage.turn_s + stage.ended_s for stage in stages]
        return max([*busy_s, *(begin + turned + rest for begin, turned in zip(begins_s, turned_s, strict=True))])
    for stage, begin_s, tail_s in zip(stages, begins_s, tails_s, strict=True):
        before_s = begin_s + (deal.share.micro_batches - 1) * stage.turn_s + stage.forward_s
        busy_s.append(before_s + stage.turn_s - stage.forward_s + tail_s + rest)
        busy_s.append(before_s + stage.synchronized_s + stage.ended_s + rest)
    return max(busy_s)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a stage has to do.

    Args:
        forward_s: Of one micro-batch, with sums over axis `model`.
        turn_s: The same, forward and backward.
        device_s: All that its device does in a step, with the sums that it waits for.
        computed_s: The same without them.
        link_s: All that its link does.
        fetched_s: Before this its first forward cannot have begun, for the rows that it needs.
        synchronized_s: From the begin of its last backward until its gradients are sent.
        ended_s: Its update, and what is sent of that.
    """

    forward_s: float
    turn_s: float
    device_s: float
    computed_s: float
    link_s: float
    fetched_s: float
    synchronized_s: float
    ended_s: float

    @staticmethod
    def of(deal: Deal, number: int) -> _Stage:
        """From the pieces and tables that a plan deals to a stage."""
        works, count = deal.pieces(number), deal.share.micro_batches
        bundles = [bundle for bundle in deal.bundles if bundle.stage == number]
        before_s, here_s, behind_s = deal.calls_s(number)
        forward_s, turn_s = sum(map(forward_of, works)) + here_s, sum(map(total_s, works)) + here_s
        update_s = deal.update.dense_s(works) + deal.update.tables_s(bundles)
        gathered_s, dense_s = _gathered_s(deal, works), _dense_s(deal, works)
        rows_s = sum((count if bundle.exchange.is_split else 1) * bundle.exchange.total.seconds for bundle in bundles)
        summed_s = sum(work.all_reduced.seconds + work.all_reduced_again.seconds for work in works)
        return _Stage(
            forward_s,
            turn_s,
            # Past the modules of others a rank runs while it waits for sums, too.
            device_s=count * (turn_s + max(0.0, before_s + behind_s - summed_s)) + update_s,
            computed_s=count * (before_s + turn_s - summed_s + behind_s) + update_s,
            link_s=sum(dense_s) + rows_s + count * (summed_s + _passed_s(deal, number)) + gathered_s,
            fetched_s=_fetched_s(deal, bundles, works, here_s),
            synchronized_s=_synchronized_s(bundles, works, dense_s),
            ended_s=update_s + gathered_s,
        )


def _begins(deal: Deal, stages: Sequence[_Stage]) -> list[float]:
    """When the first forward of each stage begins: when others have sent it what it reads."""
    begins_s: list[float] = []
    for number, stage in enumerate(stages):
        sources = [source for source, target in deal.flows if target == number] or [number - 1]
        came_s = [begins_s[source] + stages[source].forward_s for source in sources if 0 <= source < number]
        begins_s.append(max(stage.fetched_s, *came_s, 0.0))
    return begins_s


def _tails(deal: Deal, stages: Sequence[_Stage]) -> list[float]:
    """From the last backward of each stage to the end of all that waits for it."""
    tails_s = [stage.ended_s for stage in stages]
    for number in range(len(stages)):
        for before, stage in enumerate(stages[:number]):
            targets = [target for source, target in deal.flows if source == before] or [before + 1]
            if number in targets:
                tails_s[number] = max(tails_s[number], stage.turn_s - stage.forward_s + tails_s[before])
    return tails_s


def forward_of(work: Work) -> float:
    """Forward of a piece, with the sum that it waits for."""
    return work.forward_s + work.all_reduced.seconds


def _dense_s(deal: Deal, works: Sequence[Work]) -> list[float]:
    """Of the dense gradients of each piece, the last one first: as if they went one by one, but with one latency."""
    if deal.share.data == 1 or deal.plan.memory.full_shard:
        return [0.0] * len(works)
    nothing_s = all_reduce_cost(0, deal.network, deal.share.data).seconds
    reduced_s = [all_reduce_cost(work.parameters_bytes, deal.network, deal.share.data).seconds for work in works]
    first = next((place for place, work in enumerate(works) if work.parameters_bytes), None)
    return [reduced - (place != first) * nothing_s for place, reduced in enumerate(reduced_s)][::-1]


def _gathered_s(deal: Deal, works: Sequence[Work]) -> float:
    """Of parameters that others updated."""
    if not deal.plan.memory.shard_optimizer:
        return 0.0
    parameters_bytes = sum(work.parameters_bytes for work in works)
    return gather_cost(parameters_bytes, deal.plan.memory, deal.network, deal.share.data).seconds


def _passed_s(deal: Deal, number: int) -> float:
    """Of what a stage sends to others for one micro-batch, forward and backward."""
    pipe = deal.share.pipe
    return sum(cost.seconds for pair, cost in deal.flows.items() if number in pair and (pair[0] - pair[1]) % pipe)


def _fetched_s(deal: Deal, bundles: Sequence[Bundle], works: Sequence[Work], begun_s: float) -> float:
    """By how much rows come later than pieces that do not need them take; the first of a stage takes something more.

    Without lookahead row numbers are told before; and those of stages when a lookup comes, which waits for all of it.
    """
    split = [bundle for bundle in bundles if bundle.exchange.is_split]
    told_s = 0.0 if deal.lookahead else sum(bundle.exchange.told.seconds for bundle in split)
    if deal.share.pipe > 1 and not deal.lookahead:
        return told_s + sum(bundle.exchange.values.seconds for bundle in split)
    linked_s = waited_s = 0.0
    for bundle in split:
        linked_s += bundle.exchange.values.seconds
        before = [forward_of(work) for work in works if work.number < bundle.first]
        before_s = begun_s + sum(before) if before else 0.0
        waited_s = max(waited_s, linked_s - before_s)
    return told_s + waited_s


def _synchronized_s(bundles: Sequence[Bundle], works: Sequence[Work], dense_s: Sequence[float]) -> float:
    """The link sends gradients as they come to be: from any of them on it has all that come later to send."""
    now_s = over_s = 0.0
    for work, dense in zip(reversed(works), dense_s, strict=True):
        now_s += total_s(work) - forward_of(work)
        sent_s = dense + sum(bundle.exchange.values.seconds for bundle in bundles if bundle.first == work.number)
        over_s = max(over_s, now_s) + sent_s if sent_s else over_s
    return max(over_s, now_s)
