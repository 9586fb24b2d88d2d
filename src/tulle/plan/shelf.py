"""`Shelf`: plans that were made before, by model, cluster and limits, in the user's cache; and what became of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tulle.cost import Network
from tulle.errors import PlanError
from tulle.plan.plan import Plan
from tulle.whole_file import write_whole
from tulle.workload import Cluster, Profile

CACHE = "TULLE_CACHE"
"""Names a folder for what is kept; else `$XDG_CACHE_HOME/tulle`, else `~/.cache/tulle`."""
PLANNER = 10
"""To be raised when the planner would choose otherwise: plans that an older one made are not taken again."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder of plans.

    Args:
        folder: Where they lie.

    Example:
        >>> import tempfile
        >>> shelf = Shelf(Path(tempfile.mkdtemp()))
        >>> shelf.put("translator", Plan({"data": 4}))
        >>> shelf.find("translator") == Plan({"data": 4}), shelf.find("recommender")
        (True, None)
    """

    folder: Path

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Shelf:
        """The user's own shelf: in the folder that the environment names, or else in the user's cache."""
        named = environment.get(CACHE)
        if named:
            return Shelf(Path(named) / "plans")
        home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", ".")) / ".cache"
        return Shelf(Path(home) / "tulle" / "plans")

    def find(self, key: str) -> Plan | None:
        """The plan that was kept under a key, or None; one that cannot be read counts as none."""
        path = self._path(key)
        try:
            return Plan.load(path) if path.exists() else None
        except (PlanError, OSError):  # a folder that nobody may look into, say
            return None

    def put(self, key: str, plan: Plan) -> None:
        """Keep a plan; the file is complete or absent. What was noted of an earlier one goes with that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan.save(self._path(key))
        self._note(key).unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Have the plan made anew next time."""
        for path in (self._path(key), self._note(key)):
            path.unlink(missing_ok=True)

    def note(self, key: str, words: str) -> None:
        """Keep with a plan that steps did not take what it predicts."""
        if self._path(key).exists():
            write_whole(self._note(key), words + "\n")

    def noted(self, key: str) -> str | None:
        """What was noted of a plan, or None."""
        try:
            return self._note(key).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _note(self, key: str) -> Path:
        return self.folder / f"{key}.off.txt"


def key_of(profile: Profile, cluster: Cluster, **limits: object) -> str:
    """A name for what a plan depends on: the model's pieces and tables, the cluster, the batch, and limits if any.

    What is measured counts to one digit, and of times only the step's: two profiles of one model on one machine differ
    in them, and mean the same plan, but one of a busy machine and one of a quiet machine do not.
    """
    told = {
        "model": profile.model,
        "batch": profile.batch,
        "step_s": _rounded(profile.step_s),
        "pieces": [(piece.name, piece.parameters_bytes) for piece in profile.modules],
        "tables": [
            (table.name, table.rows, table.width, table.is_sparse, table.placements) for table in profile.tables
        ],
        "optimizer": (_rounded(profile.optimizer.state_share), profile.optimizer.updates_all_rows),
        "activations_bytes": _rounded(float(sum(piece.activations_bytes for piece in profile.modules))),
        "lookups": [_rounded(table.tokens) for table in profile.tables],
        "lookahead": profile.lookahead,
        "hosts": cluster.hosts,
        "processes_per_host": cluster.processes_per_host,
        "memory_bytes": cluster.machine.memory_bytes,
        "networks": [_told(one) for one in (cluster.across, cluster.inside)],
        "limits": {name: str(value) for name, value in sorted(limits.items())},
    }
    return digest(told)


def _told(network: Network | None) -> dict[str, object]:
    return {} if network is None else {name: _rounded(value) for name, value in asdict(network).items()}


def digest(told: Mapping[str, object]) -> str:
    """A short name for plain values, another one where plans are made in another way."""
    return hashlib.sha256(json.dumps([PLANNER, told], sort_keys=True).encode()).hexdigest()[:24]


def _rounded(value: object) -> object:
    """A measured number to one digit, so that the same network is the same tomorrow."""
    return f"{value:.0e}" if isinstance(value, float) else str(value)
