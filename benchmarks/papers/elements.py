"""Zen's arithmetic: what schemes cost for sparse tensors by how they densify, and its models whose tables are sparse.

Zen counts non-zero elements and sends each with its number: `Elements` (OSDI'25, equations 1 and 2, appendix B.1).
Machines communicate, after a dense sum over NVLink within each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

import torch

from tulle.cost import Characteristics, Network
from tulle.partition import Contiguous
from tulle.presence import presence_like
from tulle.sync import scheme_named
from tulle.tables import PLACEMENTS

MACHINES, GPUS = 16, 8
VALUE_BYTES = 4
HIERARCHICAL = "hierarchical:ring+holders"
HASHING_S_PER_VALUE = 6e-3 / (214e6 * 0.052)
NVLINK = Network(1e-5, 1e11)
LATENCY_S = 2e-5


@dataclass(frozen=True, slots=True)
class Elements:
    """Zen's costs of one tensor between machines, in values received by each: times 4 bytes by the link's rate.

    Args:
        values: Of the dense tensor, Zen's M.
        densities: Of the sum over 1, 2, ... n machines: Zen's d, ... d^n.
        skewness: Zen's s^n.
    """

    values: float
    densities: Sequence[float]
    skewness: float

    @property
    def all_reduce(self) -> float:
        """Ring of the dense tensor."""
        return 2 * self._others * self.values

    @property
    def allgather(self) -> float:
        """AGsparse: each value with its number."""
        return 2 * (self._machines - 1) * self.densities[0] * self.values

    @property
    def hierarchical(self) -> float:
        """SparCML's recursive doubling: Zen's Hierarchical Centralization, equation 2."""
        rounds = [self.densities[2**i - 1] for i in range(int(log2(self._machines)))]
        return 2 * sum(rounds) * self.values

    @property
    def blocks(self) -> float:
        """OmniReduce: no numbers, but the fullest owner of consecutive blocks sets the pace: at most all its part."""
        fullest = [min(1.0, self.skewness * density) for density in (self.densities[0], self.densities[-1])]
        return self._others * sum(fullest) * self.values

    @property
    def balanced(self) -> float:
        """Balanced Parallelism: equation 1, with a number beside each value."""
        return 2 * self._others * (self.densities[0] + self.densities[-1]) * self.values

    @property
    def zen(self) -> float:
        """Balanced Parallelism with the hash bitmap in the pull (section 3.3)."""
        return self._others * (2 * self.densities[0] + self.densities[-1] + 1 / 32) * self.values

    @property
    def _machines(self) -> int:
        return len(self.densities)

    @property
    def _others(self) -> float:
        return (self._machines - 1) / self._machines


@dataclass(frozen=True)
class Natural:
    """A model of Zen's table 1, whose embeddings have sparse gradients of themselves.

    Args:
        name: The paper's.
        dense: Values of all else.
        embedding: Values of its tables.
        density: Of one GPU's gradient.
        width: Values of a row.
        exponent: Of the Zipf law by which rows are drawn.
    """

    name: str
    dense: float
    embedding: float
    density: float
    width: int
    exponent: float

    @property
    def rows(self) -> int:
        """Of its tables together."""
        return round(self.embedding / self.width)

    @cached_property
    def looks(self) -> Characteristics:
        """The rows of all GPUs."""
        held = (round(self.density * self.rows),) * (MACHINES * GPUS)
        return Characteristics(self.rows, self.width, VALUE_BYTES, held, presence_like(self.rows, held, self.exponent))

    @cached_property
    def densities(self) -> list[float]:
        """Of the sum over 1, 2, ... all GPUs."""
        growth = self.looks.spread.growth()
        return [self.density * rows / growth[0] for rows in growth]

    def elements(self, machines: int = MACHINES) -> Elements:
        """As Zen counts, a machine's GPUs having summed over NVLink."""
        by_machine = self.densities[GPUS - 1 : machines * GPUS : GPUS]
        return Elements(self.embedding, by_machine, skewness(self, machines, GPUS))

    def seconds(self, values: Callable[[Elements], float], bytes_per_s: float, machines: int = MACHINES) -> float:
        """A scheme for the tables, AllReduce for the rest; Zen's hashing is counted for Zen."""
        tables = self.elements(machines)
        dense = Elements(self.dense, tables.densities, 1.0).all_reduce
        hashing_s = HASHING_S_PER_VALUE * self.embedding * tables.densities[0] if values is zen_values else 0.0
        return (dense + values(tables)) * VALUE_BYTES / bytes_per_s + hashing_s

    def tulle_s(self, bytes_per_s: float) -> dict[str, float]:
        """By way, what tulle predicts for the tables' rows, with AllReduce for the rest."""
        network, ranks = shared_link(bytes_per_s), MACHINES * GPUS
        dense_s = Elements(self.dense, self.densities[:MACHINES], 1.0).all_reduce * VALUE_BYTES / bytes_per_s
        costs = {name: scheme_named(name).cost(self.looks, network, ranks) for name in ("allgather", HIERARCHICAL)}
        costs["rows"] = PLACEMENTS["rows"].cost(self.looks, network, ranks)
        return {name: dense_s + cost.seconds for name, cost in costs.items()}


def all_reduce_values(tables: Elements) -> float:
    """Of AllReduce."""
    return tables.all_reduce


def zen_values(tables: Elements) -> float:
    """Of Zen."""
    return tables.zen


def skewness(model: Natural, parts: int, ranks: int) -> float:
    """Zen's s over so many equal consecutive parts, of the sum of the first ranks."""
    spread = model.looks.spread.among(range(ranks))
    owned = torch.bincount(Contiguous(model.rows, parts).place(spread.rows)[0], minlength=parts)
    return float(owned.max()) * parts / len(spread.rows)


def shared_link(bytes_per_s: float) -> Network:
    """All GPUs of all machines: those of a machine share its link, but a ring passes through it once."""
    across = Network(LATENCY_S, bytes_per_s / GPUS)
    return Network(
        LATENCY_S,
        bytes_per_s / GPUS,
        all_reduce_bytes_per_s=bytes_per_s,
        local_ranks=GPUS,
        inside=NVLINK,
        across=across,
    )
