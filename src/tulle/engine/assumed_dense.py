"""Dense gradients that travel by rows, because most of theirs are zero, as those of tables that are looked up are.

`nn.Embedding` gives a dense gradient unless it was made with `sparse=True`, and everybody sends it whole: of 100,000
rows, say, of which 2,000 are not zero. After the first backward the ranks tell how many rows each has of it. Where
these are predicted to take clearly less, they travel as those of a sparse gradient do, and are written into the dense
one, so that neither the program nor its optimizer sees a difference. Nothing is assumed of where the zeros come from:
each step's gradient is looked at anew, and sent whole if it is full.

Source: the reverse of *Densifying Assumed-sparse Tensors* (arXiv 1905.04035).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tulle.cost import Characteristics, Cost, Network, all_reduce_cost, percent
from tulle.engine.slots import Slot
from tulle.engine.tables import TableSettings
from tulle.rows import is_row_filled
from tulle.sync import AUTO, DENSIFY, choose_together

logger = logging.getLogger("tulle")
LEAST_BYTES = 2**20
"""Of a gradient that is looked at: less is sent in no time, beside others."""
WORTHWHILE = 0.7
"""Rows must be predicted to take at most so much of the seconds of the whole."""


def filled_rows(gradients: Mapping[str, Tensor]) -> dict[str, int]:
    """How many rows of dense gradients are not zero, of those that may be worth it; sends nothing.

    Args:
        gradients: By name, of one rank.
    """
    return {
        name: int(is_row_filled(gradient).sum())
        for name, gradient in gradients.items()
        if type(gradient) is Tensor
        and gradient.is_floating_point()
        and gradient.layout == torch.strided
        and gradient.dim() == 2
        and gradient.nbytes >= LEAST_BYTES
    }


def travel_by_rows(
    told: Sequence[Mapping[str, int]],
    slots: Mapping[str, Slot],
    settings: TableSettings,
    network: Network,
    *,
    says: bool = False,
) -> set[str]:
    """Names of the parameters whose dense gradients travel by rows, the same on all ranks.

    Args:
        told: What `filled_rows` gave on each rank; a parameter that one leaves out has no gradient there.
        slots: The parameters, by name.
        settings: How tables are kept in step: a scheme that is given settles it.
        network: What the axis gives.
        says: Whether to log them.
    """
    chosen: set[str] = set()
    for name in dict.fromkeys(name for of_rank in told for name in of_rank):
        given = settings.schemes.get(name, AUTO)
        num_rows, width = slots[name].parameter.shape
        held = tuple(of_rank.get(name, 0) for of_rank in told)
        looks = Characteristics(num_rows, width, slots[name].parameter.itemsize, held)
        rows_s = by_rows(looks, network).seconds
        is_faster = any(held) and is_worthwhile(rows_s, looks, network)
        if given == DENSIFY or (given == AUTO and not is_faster):
            continue
        chosen.add(name)
        if says:
            logger.info(
                "table %s: its gradient is dense, but for %s of %s rows a rank zero: rows are sent, at first predicted "
                "at %.3g ms, the whole at %.3g",
                name,
                percent(looks.density),
                f"{num_rows:,}",
                rows_s * 1e3,
                whole(looks, network).seconds * 1e3,
            )
    return chosen


def by_rows(looks: Characteristics, network: Network) -> Cost:
    """What a dense gradient takes that travels by rows: the cheapest scheme.

    To look for the rows takes less than to copy the whole into a bucket, which is not priced either.
    """
    [choice] = choose_together([looks], network, len(looks.rows_per_rank))
    return dict(choice.candidates)[choice.scheme]


def whole(looks: Characteristics, network: Network) -> Cost:
    """What it takes that is sent as it is, in a bucket."""
    return all_reduce_cost(looks.dense_bytes, network, len(looks.rows_per_rank))


def is_worthwhile(rows_s: float, looks: Characteristics, network: Network) -> bool:
    """Whether a gradient that takes so many seconds by rows is to be sent so."""
    return looks.dense_bytes >= LEAST_BYTES and rows_s <= WORTHWHILE * whole(looks, network).seconds
