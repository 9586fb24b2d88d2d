"""`Bundle`: tables that travel as one under a plan, or in one packet, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tulle.cost import Network
from tulle.plan.exchange import Exchange, Tariff, bundles
from tulle.plan.plan import Plan
from tulle.plan.work import Share, Work, is_parameter
from tulle.sync import AUTO


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tables that travel as one, or in one packet.

    Args:
        names: Of the tables.
        stage: Where they live.
        first: Number of the piece that looks one of them up first, whose backward gives the last gradient.
        exchange: Of split tables of one micro-batch, of replicas of the whole step.
    """

    names: tuple[str, ...]
    stage: int
    first: int
    exchange: Exchange


def bundles_of(plan: Plan, works: Sequence[Work], share: Share, network: Network, tariff: Tariff) -> list[Bundle]:
    """The bundles of a plan: tables of one kind, stage and scheme. What is a parameter like others is in no bundle.

    Args:
        plan: What happens to each table.
        works: The pieces.
        share: How the step is dealt.
        network: Of axis `data`.
        tariff: What exchanges cost.
    """
    pieces = {work.name: work for work in works}
    found: list[Bundle] = []
    for scheme in dict.fromkeys(plan.schemes.values()):
        named = [tariff.table(name) for name, of_table in plan.schemes.items() if of_table == scheme]
        tables = [table for table in named if not is_parameter(table, plan)]
        of_stages: dict[int, list[tuple[str, ...]]] = {}
        for names in bundles(tables, lambda table: pieces[table.module].stage):
            of_stages.setdefault(pieces[tariff.table(names[0]).module].stage, []).append(names)
        for stage, of_stage in of_stages.items():
            for names, exchange in _exchanges(of_stage, scheme, share, network, tariff).items():
                first = min(pieces[tariff.table(name).module].number for name in names)
                found.append(Bundle(names, stage, first, _of_turn(exchange, names, share, network, tariff)))
    return sorted(found, key=lambda bundle: bundle.first)


def _exchanges(
    groups: Sequence[tuple[str, ...]], scheme: str, share: Share, network: Network, tariff: Tariff
) -> dict[tuple[str, ...], Exchange]:
    """Of tables of one stage and scheme, by kind; those left to the run-time may all be in one packet."""
    if scheme != AUTO:
        return {
            names: tariff.exchange(names, scheme, network, ranks=share.data, batches=share.batches) for names in groups
        }
    sparse = tuple(name for names in groups for name in names if tariff.table(name).is_sparse)
    packet = tariff.packet(sparse, network, ranks=share.data, batches=share.batches) if sparse else None
    found = {sparse: packet} if packet else {}
    for names in groups:
        if not packet or names[0] not in sparse:
            beside = [name for name in sparse if name not in names]
            options = tariff.options(names, network, ranks=share.data, batches=share.batches, beside=beside)
            found[names] = min((one for one in options if not one.is_split), key=lambda one: one.total.seconds)
    return found


def _of_turn(exchange: Exchange, names: Sequence[str], share: Share, network: Network, tariff: Tariff) -> Exchange:
    """Of split tables what one micro-batch exchanges."""
    if not exchange.is_split or share.micro_batches == 1:
        return exchange
    return tariff.of_part(exchange, names, network, batches=share.batches, part=1 / share.micro_batches)
