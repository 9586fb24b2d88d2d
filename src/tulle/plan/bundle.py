"""`Bundle`: tables that travel as one under a plan, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tulle.cost import Network
from tulle.plan.exchange import Exchange, Tariff, bundles
from tulle.plan.plan import Plan
from tulle.plan.work import Share, Work
from tulle.sync import AUTO


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tables that travel as one.

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
    """The bundles of a plan: tables of one kind, stage and scheme. Replicas with dense gradients are in no bundle.

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
        tables = [tariff.table(name) for name, of_table in plan.schemes.items() if of_table == scheme]
        for names in bundles(tables, lambda table: pieces[table.module].stage):
            found += _bundle(names, scheme, pieces, share, network, tariff)
    return sorted(found, key=lambda bundle: bundle.first)


def _bundle(
    names: tuple[str, ...], scheme: str, pieces: dict[str, Work], share: Share, network: Network, tariff: Tariff
) -> list[Bundle]:
    first = min((pieces[tariff.table(name).module] for name in names), key=lambda work: work.number)
    if scheme == AUTO:
        options = tariff.options(names, network, ranks=share.data, batches=share.batches)
        exchange = min((one for one in options if not one.is_split), key=lambda one: one.total.seconds)
    else:
        exchange = tariff.exchange(names, scheme, network, ranks=share.data, batches=share.batches)
    if exchange.is_split and share.micro_batches > 1:
        exchange = tariff.of_part(exchange, names, network, batches=share.batches, part=1 / share.micro_batches)
    return [Bundle(names, first.stage, first.number, exchange)]
