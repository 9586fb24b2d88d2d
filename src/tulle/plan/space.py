"""`Space`: what a plan may be for a model on a cluster: its meshes, ways of saving memory, micro-batches and cuts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from tulle.errors import PlanError
from tulle.memory import Memory
from tulle.memory.options import HOST
from tulle.names import as_names, was_meant
from tulle.plan.plan import AT_READ, AT_STEP, BUCKET_BYTES, MODEL, PIPE, PIPELINE_SCHEDULES
from tulle.plan.work import AXES, DATA
from tulle.sync import AUTO, check_scheme
from tulle.tables import PLACEMENTS
from tulle.workload import Profile

MIB = 2**20
BUCKETS_BYTES = (BUCKET_BYTES, 4 * MIB, 100 * MIB)
"""Sizes of buckets that are tried."""
FILLED = 4
"""With so many micro-batches a stage the bubble is negligible: Huang et al., *GPipe* (NeurIPS'19), section 2.3."""
MOST_CUTS = 64
"""If there are more ways to cut a model into stages, one is found by dynamic programming."""
MOST_SUBSETS = 4
"""If more modules than this can be split, or recompute, not all subsets of them are tried."""


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen. What is not given is free.

    Args:
        mesh: Sizes of the axes that are fixed, by name.
        schemes: Of tables that are fixed: a scheme or a placement by name, or `"auto"` for any scheme and no placement.
        memories: Ways of saving memory, without what is recomputed.
        recomputes: Whether modules may recompute their activations.
        schedules: When replicas are updated.
        pipeline_schedules: In which order stages take micro-batches.
        buckets_bytes: Sizes of buckets of dense gradients, the one that is taken if it makes no difference first.
        shares_with_tables: Whether `shard_optimizer` may go with tables that are sparse or split, which are stepped as
            without it.

    Raises:
        PlanError: If there is no such axis, scheme or schedule, or a size is not positive.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    schemes: Mapping[str, str] = field(default_factory=dict)
    memories: tuple[Memory, ...] = (
        Memory(),
        Memory(shard_optimizer=True),
        Memory(full_shard=True),
        Memory(full_shard=HOST),
    )
    recomputes: bool = True
    schedules: tuple[str, ...] = (AT_STEP, AT_READ)
    pipeline_schedules: tuple[str, ...] = ("1f1b",)
    buckets_bytes: tuple[int, ...] = BUCKETS_BYTES
    shares_with_tables: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", as_names(self.schedules))
        object.__setattr__(self, "pipeline_schedules", as_names(self.pipeline_schedules))
        _check_known("axis", self.mesh, AXES)
        _check_known("schedule", self.schedules, (AT_STEP, AT_READ))
        _check_known("pipeline_schedule", self.pipeline_schedules, PIPELINE_SCHEDULES)
        for name, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise PlanError(f"the space has {size!r} ranks along axis {name!r}, expected a positive number")
        for scheme in self.schemes.values():
            check_scheme(scheme, extra=(AUTO, *PLACEMENTS))

    def check_tables(self, profile: Profile) -> None:
        """Check that the profile has the tables whose scheme is fixed.

        Raises:
            PlanError: Naming the one that it has not.
        """
        tables = [table.name for table in profile.tables]
        for name in self.schemes:
            if name not in tables:
                known = ", ".join(tables) or "none"
                raise PlanError(
                    f"the space has a scheme for {name!r}, the profile's tables are: {known}{was_meant(name, tables)}"
                )

    def meshes(self, ranks: int, profile: Profile) -> list[dict[str, int]]:
        """All arrangements of ranks that the model can use.

        Raises:
            PlanError: If there is none.

        Example:
            >>> from tulle.cost import Network
            >>> from tulle.workload import *
            >>> machine = Machine(1e12, 1e11)
            >>> pieces = tuple(ModuleProfile(name, 1e-3, 2e-3) for name in ("body", "head"))
            >>> cluster = Cluster(4, 1, machine, Network(1e-4, 1e9))
            >>> profile = Profile("Net", 8, pieces, (), OptimizerProfile(2.0, 1e-9), cluster, 6e-3)
            >>> Space().meshes(4, profile)
            [{'data': 4}, {'pipe': 2, 'data': 2}]
        """
        most = {PIPE: len(profile.modules), MODEL: ranks if any(piece.split for piece in profile.modules) else 1}
        found: list[dict[str, int]] = []
        for pipe in divisors(ranks):
            for model in divisors(ranks // pipe):
                sizes = {PIPE: pipe, DATA: ranks // pipe // model, MODEL: model}
                is_fixed = all(sizes.get(name, 1) == size for name, size in self.mesh.items())
                if is_fixed and all(sizes[name] <= size for name, size in most.items()):
                    found.append({name: sizes[name] for name in AXES if name == DATA or sizes[name] > 1})
        if ranks % math.prod(self.mesh.values()):
            raise PlanError(f"no mesh of {ranks} ranks has {dict(self.mesh)}: sizes of axes multiply to that number")
        if not found:
            raise PlanError(
                f"no mesh of {ranks} ranks has {dict(self.mesh)}: of a model of {most[PIPE]} pieces at most so many "
                "stages can be made, and axis 'model' needs modules that can be split"
            )
        return found

    def micro_batches(self, profile: Profile, mesh: Mapping[str, int], samples: float, *, is_tight: bool) -> list[int]:
        """Into how many micro-batches a replica's samples can be cut; without a pipeline only to save memory.

        Args:
            profile: Of the model, which says whether it takes parts of a batch.
            mesh: Size of each axis by name.
            samples: Of one replica.
            is_tight: Whether there is a limit of memory.
        """
        pipe = mesh.get(PIPE, 1)
        if not profile.is_divisible or (pipe == 1 and not is_tight):
            return [1]
        most = max(1, min(math.floor(samples), FILLED * max(pipe, 2)))
        return [2**power for power in range(most.bit_length())]

    def memories_for(
        self, profile: Profile, data: int, *, local_ranks: int = 1, is_tight: bool = False
    ) -> list[Memory]:
        """Ways of saving memory that an axis `data` of such a size can use.

        Parameters are shared out beside no sparse table and none whose placement is given. Tables with dense gradients
        are then parameters like others: as they could be split instead, only where memory is limited. Each host's ranks
        share them out among themselves where it has several of the axis, `local_ranks`, and not all.
        """
        has_tables = any(table.is_sparse for table in profile.tables)
        may_share_out = not profile.tables or (is_tight and not has_tables and not self.schemes)
        return [
            memory
            for memory in self.memories
            if (data > 1 or not (memory.shard_optimizer or memory.full_shard))
            and (not memory.shard_optimizer or self.shares_with_tables or not has_tables)
            and (may_share_out or not memory.full_shard)
            and (memory.full_shard != HOST or 1 < local_ranks < data)
        ]

    def emptiness(self, ranks: int, profile: Profile, batch: int) -> str:
        """Why there is nothing to choose from."""
        samples = "sample" if batch == 1 else "samples"
        if all(batch < mesh[DATA] for mesh in self.meshes(ranks, profile)):
            return (
                f"a step of {batch} {samples} is too small for every mesh of {ranks} ranks that this model can use: "
                "each replica needs a sample"
            )
        return (
            f"none of the space's memories can be used on {ranks} ranks: state and parameters are shared out over an "
            "axis 'data' of several ranks, and not beside sparse or split tables: add Memory() to them"
        )

    def schedules_for(self, mesh: Mapping[str, int], memory: Memory) -> list[str]:
        """When replicas can be updated: those of whole models, by an optimizer that has all of it, also when read."""
        is_plain = mesh.get(PIPE, 1) == mesh.get(MODEL, 1) == 1 < mesh.get(DATA, 1)
        is_plain = is_plain and not (memory.shard_optimizer or memory.full_shard or memory.precision)
        return [schedule for schedule in self.schedules if schedule != AT_READ or is_plain] or [AT_STEP]


def _check_known(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise PlanError(f"the space has the {kind} {name!r}, expected one of {', '.join(known)}")


def divisors(number: int) -> list[int]:
    """Of a number, ascending.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return small + [number // one for one in reversed(small) if one * one != number]


def cuts(pieces: int, stages: int) -> Iterator[list[int]]:
    """All ways to cut so many pieces into consecutive stages, none empty: the stage of each.

    Example:
        >>> [*cuts(3, 2)]
        [[0, 1, 1], [0, 0, 1]]
    """
    for ends in combinations(range(1, pieces), stages - 1):
        bounds = (0, *ends, pieces)
        yield [stage for stage, (begin, end) in enumerate(pairwise(bounds)) for _ in range(begin, end)]


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All of them, the smaller first."""
    for size in range(len(names) + 1):
        yield from combinations(names, size)
