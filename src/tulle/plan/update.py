"""`Update`: what the optimizer's step takes of each rank under a plan, and what the step takes besides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tulle.cost import Network
from tulle.engine.split_tables import delays_rows
from tulle.plan.bundle import Bundle
from tulle.plan.exchange import Tariff
from tulle.plan.plan import AT_READ, Plan
from tulle.plan.sharing import sharers
from tulle.plan.work import NARROW, Share, Work, bytes_of
from tulle.tables import COLUMNS, PLACEMENTS
from tulle.workload import Profile, TableProfile

AHEAD_CALLS = 5
"""What finding rows of a late table ahead of its update takes, in updates of a table with next to no rows: measured."""


@dataclass(frozen=True, slots=True)
class Update:
    """How long the optimizer takes, for dense parameters and for tables.

    Args:
        plan: What is shared out.
        profile: What a byte takes.
        share: How the step is dealt.
        network: Of axis `data`.
        tariff: What gradients look like.
        lookahead: Whether the loop goes through `tulle.lookahead`.
    """

    plan: Plan
    profile: Profile
    share: Share
    network: Network
    tariff: Tariff
    lookahead: bool

    def dense_s(self, pieces: Iterable[Work]) -> float:
        """Seconds for the dense parameters of some pieces; a rank that shares them out with others does its part."""
        memory = self.plan.memory
        stepped_bytes = sum(work.parameters_bytes for work in pieces) / (NARROW if memory.precision else 1)
        return stepped_bytes * dense_s_per_byte(self.profile, sharers(memory, self.network, self.share.data))

    def tables_s(self, bundles: Sequence[Bundle]) -> float:
        """Seconds for the tables of some bundles: the rows that gradients touch, of split tables this rank's."""
        split = [name for bundle in bundles if bundle.exchange.is_split for name in bundle.names]
        found_s = AHEAD_CALLS * self.profile.optimizer.table_s if self.delays_rows(bundles) else 0.0
        rows_s = sum(self._rows_s(name, bundle.exchange.scheme) for bundle in bundles for name in bundle.names)
        return rows_s + found_s * len(split)

    def _rows_s(self, name: str, scheme: str) -> float:
        table, ranks, optimizer = self.tariff.table(name), self.share.data, self.profile.optimizer
        part = 1 / ranks if scheme in PLACEMENTS else 1.0
        if is_dense(table, self.profile):
            return part * bytes_of(table) * optimizer.step_s_per_byte
        if scheme == COLUMNS:  # a rank has all the rows that others have, though less of each
            part += (1 - part) * optimizer.row_fixed_share
        return part * self.tariff.updated_bytes(name, ranks, self.share.batches) * row_s(self.profile)

    def delays_rows(self, bundles: Sequence[Bundle]) -> bool:
        """Whether some rows of these tables' gradients go later: only who knows the next batch can tell which."""
        if not self.lookahead or self.plan.schedule != AT_READ or self.share.data == 1:
            return False
        split = [name for bundle in bundles if bundle.exchange.is_split for name in bundle.names]
        gradients_bytes = sum(self.tariff.pushed_bytes(name, self.share.data, self.share.batches) for name in split)
        return delays_rows(gradients_bytes, self.network)


def dense_s_per_byte(profile: Profile, ranks: int) -> float:
    """Seconds of the optimizer for a byte of dense parameters, of which each of so many ranks steps its share."""
    optimizer = profile.optimizer
    return optimizer.step_s_per_byte * (optimizer.fixed_share + (1 - optimizer.fixed_share) / ranks)


def rest_s(profile: Profile, share: Share) -> float:
    """What a step takes besides its pieces and the optimizer: a loop's own work, in proportion to a rank's samples."""
    pieces_s = sum(piece.forward_s + piece.backward_s for piece in profile.modules)
    return max(0.0, profile.step_s - pieces_s - alone_update_s(profile)) * share.batches * share.data / share.ranks


def alone_update_s(profile: Profile) -> float:
    """What the optimizer took of the process that was measured."""
    dense_bytes = sum(piece.parameters_bytes for piece in profile.modules)
    dense_bytes += sum(bytes_of(table) for table in profile.tables if is_dense(table, profile))
    rows_bytes = sum(
        (len(table.stream[0][0]) if table.stream else table.tokens) * table.width * table.value_bytes
        for table in profile.tables
        if not is_dense(table, profile)
    )
    return dense_bytes * profile.optimizer.step_s_per_byte + rows_bytes * row_s(profile)


def is_dense(table: TableProfile, profile: Profile) -> bool:
    """Whether the optimizer moves all rows of a table, whatever was touched."""
    return not table.is_sparse and profile.optimizer.updates_all_rows


def row_s(profile: Profile) -> float:
    """Seconds of the optimizer for a byte of a row that was touched."""
    optimizer = profile.optimizer
    return optimizer.step_s_per_byte if optimizer.row_s_per_byte is None else optimizer.row_s_per_byte
