"""Whether it pays to update parameters when they are read, by what communication that could hide takes."""

from __future__ import annotations

from collections.abc import Mapping

from tulle.cost import Network, all_reduce_cost
from tulle.engine.split_tables import WORTH_S as WORTH_DIVIDING_S
from tulle.plan.plan import AT_READ, AT_STEP, Plan
from tulle.tables import PLACEMENTS

WORTH_S = 0.02
"""What must at least be put off in a step: waiting for pieces one by one costs some of it (`benchmarks/scheduling`)."""


def put_off_s(by_kind: Mapping[str, float], *, lookahead: bool) -> float:
    """Seconds of what could hide behind the next forward, from those of each kind of traffic in a step.

    Gradients of rows only do in a loop through `tulle.lookahead`, which knows what the next batch wants, and if there
    are many.

    Example:
        >>> [put_off_s({"dense": 0.01, "rows": rows_s, "compute": 0.1}, lookahead=True) for rows_s in (0.004, 0.08)]
        [0.01, 0.05]
    """
    return by_kind.get("dense", 0.0) + (_put_off_of_tables_s(by_kind.get("rows", 0.0)) if lookahead else 0.0)


def schedule_by_cost(plan: Plan, dense_bytes: int, network: Network, ranks: int) -> str:
    """`"read"` if what could then hide behind the next forward takes long enough, else `"step"`.

    That is the all-reduce of dense gradients, and the half of the exchanges of split tables that gradients are.

    Args:
        plan: With the predicted costs of its tables, where they are known.
        dense_bytes: Of dense gradients.
        network: What axis `data` gives.
        ranks: Of that axis.

    Example:
        >>> network = Network(latency_s=0.5e-3, bandwidth_bytes_per_s=118e6, all_reduce_latency_s=1.5e-3)
        >>> [schedule_by_cost(Plan({"data": 4}), dense_bytes, network, 4) for dense_bytes in (100_000, 10_000_000)]
        ['step', 'read']
    """
    split = [table for table in plan.tables if table.scheme in PLACEMENTS and table.candidates]
    tables_s = sum(table.candidates[table.scheme].seconds for table in split if table.candidates)
    late_s = all_reduce_cost(dense_bytes, network, ranks).seconds + _put_off_of_tables_s(tables_s)
    return AT_READ if late_s >= WORTH_S else AT_STEP


def _put_off_of_tables_s(exchanged_s: float) -> float:
    """Of the exchanges of split tables, gradients are half; they are only divided where they take long enough."""
    gradients_s = exchanged_s / 2
    return gradients_s if gradients_s >= WORTH_DIVIDING_S else 0.0
