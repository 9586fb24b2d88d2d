"""`Called`: what a model's own `state_dict` calls its tensors, where hooks or a method of its own rename them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tulle.checkpoint.placed import memory_of
from tulle.errors import CheckpointError
from tulle.parts import local_of


@dataclass(frozen=True, slots=True)
class Called:
    """What this rank finds in a state, by the memory in which a tensor lies.

    Args:
        names: The model's name of each tensor that the state has under another.
        strange: Keys of all tensors that the model has not under that name.
        nested: Keys of what is no tensor, and has tensors of the model within.
        missing: Names of parts that the state has not.
    """

    names: dict[str, str]
    strange: set[str]
    nested: set[str]
    missing: set[str]

    @staticmethod
    def of(
        state: Mapping[str, Any], held: Mapping[str, Tensor], *, known: Collection[str], parts: Collection[str]
    ) -> Called:
        """Compare a state with what this rank has.

        Args:
            state: The model's.
            held: This rank's tensors, by the model's names.
            known: The names of all ranks' tensors.
            parts: Names of what is not whole here.
        """
        memories = {name: memory for name, one in held.items() if (memory := memory_of(local_of(one))) is not None}
        by_memory = {memory: name for name, memory in reversed([*memories.items()])}
        found = {
            key: [memory for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and (memory := memory_of(leaf))]
            for key, value in state.items()
        }
        strange = {key for key, value in state.items() if isinstance(value, Tensor) and key not in known}
        seen = {memory for memories_of_one in found.values() for memory in memories_of_one}
        return Called(
            {key: by_memory[memory] for key in strange for memory in found[key] if memory in by_memory},
            strange,
            {k for k, ms in found.items() if not isinstance(state[k], Tensor) and not by_memory.keys().isdisjoint(ms)},
            {name for name in parts if name in memories and name not in state and memories[name] not in seen},
        )

    @staticmethod
    def together(told: Sequence[Called], kind: str) -> dict[str, str]:
        """The model's name of each tensor that its state has under another, on whatever rank it is.

        Args:
            told: By each rank.
            kind: The model's class, for errors.

        Raises:
            CheckpointError: If parts are in the state that cannot be told from wholes.
        """
        names = {key: name for one in told for key, name in one.names.items()}
        nested = sorted({key for one in told for key in one.nested})
        if nested:
            raise CheckpointError(
                f"state_dict() of {kind} has parameters within {nested[0]!r}, where a rank's parts would be taken for "
                "wholes: give tulle.distribute, tulle.save and tulle.load the module whose state that is"
            )
        unknown = sorted({key for one in told for key in one.strange} - names.keys())
        missing = sorted({name for one in told for name in one.missing})
        if missing and unknown:
            raise CheckpointError(
                f"state_dict() of {kind} has no {missing[0]!r}, of which each rank has a part, but a copy of something "
                f"as {unknown[0]!r}: have it give the parameters themselves"
            )
        return names
