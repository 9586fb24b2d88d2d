"""`Memory`: what is done on each rank so that a step takes less memory, in plans and estimates alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch

from tulle.errors import PlanError
from tulle.names import as_names

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""In which parameters can be kept, beside masters in their own dtype."""
HOST: Final = "host"
"""Of `full_shard`: over the ranks of each host."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is done on each rank so that a step takes less memory; all but `precision` is exact.

    Args:
        shard_optimizer: Whether each rank of axis `data` keeps only its share of the optimizer's state, and updates
            that share of the parameters (ZeRO-1).
        full_shard: Whether each rank of axis `data` keeps only its share of parameters, gradients and optimizer state.
            The parameters of one module after the other are gathered when it runs (ZeRO-3, FSDP). With `"host"` the
            ranks of each host share them out, and hosts are replicas (FSDP's hybrid sharding): parameters are gathered
            within a host, and only the sums of its gradients travel between hosts.
        recompute: Names of modules that keep no activations for backward: their forward runs again there.
        offload: Names of modules whose activations lie in the host's memory from forward to backward.
        precision: `"bf16"` or `"fp16"`: parameters, gradients and computation have that dtype, and the optimizer steps
            copies of the parameters in their own dtype (masters). None leaves all in their own.

    Example:
        >>> print(*Memory(shard_optimizer=True, recompute=("h.0",)).explain(), sep="; ")
        optimizer state shared out over axis data; recomputed in backward: h.0
    """

    shard_optimizer: bool = False
    full_shard: bool | Literal["host"] = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    precision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", as_names(self.recompute))
        object.__setattr__(self, "offload", as_names(self.offload))

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype that `precision` names; None if it names none."""
        return None if self.precision is None else PRECISIONS[self.precision]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of modules that it speaks of."""
        return (*self.recompute, *self.offload)

    def explain(self) -> list[str]:
        """What is done, a line each."""
        lines: list[str] = []
        if self.full_shard:
            over = "the ranks of each host along axis data" if self.full_shard == HOST else "axis data"
            lines.append(f"parameters, gradients and optimizer state shared out over {over}")
        elif self.shard_optimizer:
            lines.append("optimizer state shared out over axis data")
        if self.recompute:
            lines.append(f"recomputed in backward: {', '.join(self.recompute)}")
        if self.offload:
            lines.append(f"activations that wait on the host: {', '.join(self.offload)}")
        if self.precision:
            lines.append(f"parameters and gradients in {self.precision}, masters in their own dtype")
        return lines

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"recompute": list(self.recompute), "offload": list(self.offload)}

    def checked(self) -> Memory:
        """The same object, after a check.

        Raises:
            PlanError: If it names a precision that is not known, has something else than a bool where one belongs, or
                options that exclude one another.
        """
        if not isinstance(self.shard_optimizer, bool):
            raise PlanError(f"the plan has shard_optimizer={self.shard_optimizer!r}, expected True or False")
        if self.full_shard != HOST and not isinstance(self.full_shard, bool):
            raise PlanError(f"the plan has full_shard={self.full_shard!r}, expected True, False or {HOST!r}")
        if self.precision not in (None, *PRECISIONS):
            raise PlanError(
                f"the plan has the precision {self.precision!r}, expected None or {' or '.join(PRECISIONS)}"
            )
        if self.full_shard and self.shard_optimizer:
            raise PlanError(
                "the plan has full_shard and shard_optimizer: full_shard shares the optimizer's state out too"
            )
        return self
