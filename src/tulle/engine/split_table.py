"""`SplitTable`: a table of which this rank holds a part, as the run-time of split tables knows it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tulle.tables import Split


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """A table of which this rank holds a part.

    Args:
        number: Among the split tables of the model, the same on all ranks.
        parameter: This rank's part.
        split: Which part that is.
        is_sparse: Whether its gradient is a sparse tensor: then rows that nobody looked up must not be in it.
        is_foreseeable: Whether rows may be fetched before the lookup: not if that renormalizes them (`max_norm`), nor
            if a lookup's gradient depends on what else it looks up (`scale_grad_by_freq`).
    """

    number: int
    parameter: nn.Parameter
    split: Split
    is_sparse: bool
    is_foreseeable: bool

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.split.name

    def check_ids(self, ids: object) -> None:
        """Check that what is to be looked up is a tensor.

        Raises:
            TypeError: If it is not; as an embedding raises that is not split.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(
                f"a lookup in the table {self.name!r} was given a {type(ids).__name__}, expected ids as a tensor of "
                "int32 or int64"
            )
