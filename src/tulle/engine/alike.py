"""`Alike`: replicas are held against each other now and then, so that what parts them is told, not trained on.

    after backward 1, 2, 4, 8, ..    before the optimizer steps: two numbers of each parameter, its sum and its norm
    end of the backward after it     all ranks tell theirs, and raise alike where they differ

Gradients are the same on all ranks, so parameters stay so, unless the program writes to them, or steps, by what one
rank alone has: a rate that follows its loss, a step that it leaves out, a state that it alone loads, noise that it
draws. Between steps ranks may differ (some methods look at weights a little way off); when they step they may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from tulle.comm import Deferred, all_gather, eager
from tulle.engine.late_tensors import is_late
from tulle.engine.slots import Slot
from tulle.errors import ModelError
from tulle.mesh import Axis

_LABEL = "whether replicas are alike"
_BLOCKS, _BLOCK = 2**12, 2**4
"""Of a larger parameter as many blocks of numbers are looked at, spread over all of it, and others each time."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, lie far from each other."""
_ROUNDED = 1000
"""So many times the precision of its dtype a parameter may differ: processors of several kinds round differently."""
_LEAST_TOLERANCE, _MOST_TOLERANCE = 1e-9, 0.03


class Alike:
    """Two numbers of each replica at a step, and what other ranks have.

    Args:
        slots: The replicas, by name.
        axis: Whose ranks hold them.
        free: Names of those that ranks may have differently for a while.
        mend: What to do where they are apart.
    """

    def __init__(
        self, slots: Mapping[str, Slot], axis: Axis, free: Iterable[str] = (), *, mend: str | None = None
    ) -> None:
        self._axis = axis
        self._mend = mend or f"have all ranks load, write and draw the same, and {_ALIKE}"
        left_out = {*free}
        self._slots = [slot for name, slot in slots.items() if name not in left_out and _is_plain(slot.parameter)]
        self._places = {id(slot.parameter): place for place, slot in enumerate(self._slots)}
        self._step = 0
        self._seen: dict[int, Tensor] = {}
        """By place, `[2]`, of those that were to be stepped since the backward of that number."""
        self._rates: list[float] = []
        """Of the optimizer that was the first to step since."""
        self._told: Deferred[Tensor] | None = None
        """What all ranks have, on the way."""
        self._told_of = 0
        """After which backward it was so."""

    @eager
    def look(self, parameters: Iterable[Tensor], step: int, optimizer: Optimizer | None = None) -> None:
        """Take note of parameters as they are. Sends nothing.

        Args:
            parameters: Some of the replicas, maybe among others.
            step: Number of the backward before.
            optimizer: That is to step them, if one is.
        """
        if not _is_watched(step):
            return
        if step != self._step:
            self._step, self._seen = step, {}
            groups = optimizer.param_groups if optimizer is not None else ()
            self._rates = [float(rate) for group in groups if (rate := group.get("lr")) is not None]
        for parameter in parameters:
            place = self._places.get(id(parameter))
            if place is not None and place not in self._seen and not is_late(parameter):
                self._seen[place] = _numbers(parameter, step.bit_length() * _GOLDEN % 1)

    def check(self, step: int, *, is_late: bool) -> None:
        """Raise if ranks had other values when they stepped after the backward before. Every rank must call it.

        Args:
            step: Number of the backward that ends.
            is_late: Whether this rank is to wait for nobody now: it is told at the end of the next backward then.

        Raises:
            ModelError: On every rank, naming a parameter.
        """
        if self._told is not None:
            self._compare()
        if _is_watched(step - 1):
            self._tell(step)
            if not is_late:
                self._compare()

    def _tell(self, step: int) -> None:
        mine = torch.zeros(1 + len(self._slots), 3, dtype=torch.float64, device=self._axis.device)
        if self._step == step - 1:
            rates = torch.tensor(self._rates, dtype=torch.float64)
            weighted = float((rates * torch.arange(1.0, 1 + len(rates), dtype=torch.float64)).sum())
            mine[0] = torch.tensor([1.0, weighted, float(rates.abs().sum())])
            if self._seen:
                mine[torch.tensor([*self._seen], device=mine.device) + 1, 0] = 1.0
                mine[torch.tensor([*self._seen], device=mine.device) + 1, 1:] = torch.stack([*self._seen.values()])
        self._seen = {}
        self._told_of = step - 1
        self._told = all_gather(mine, self._axis, label=_LABEL)

    def _compare(self) -> None:
        assert self._told is not None, "told before"
        told, self._told = self._told, None
        heard = told.wait().view(self._axis.size, -1, 3).cpu()
        tolerances = [_LEAST_TOLERANCE, *(_tolerance(slot.parameter.dtype) for slot in self._slots)]
        apart = _apart(heard, torch.tensor(tolerances, dtype=torch.float64)).tolist()
        if not any(apart):
            return
        first = apart.index(True)
        by_rank = [
            f"{number:.6g} on rank {rank}" for rank, (is_there, _, number) in enumerate(heard[:, first]) if is_there
        ]
        if not first:
            raise ModelError(
                f"an optimizer stepped after backward {self._told_of} with other learning rates (their sum was "
                f"{', '.join(by_rank)} of axis {self._axis.name!r}): {_ALIKE}"
            )
        more = f" (and {sum(apart) - 1} more)" if sum(apart) > 1 else ""
        raise ModelError(
            f"the parameter {self._slots[first - 1].name!r}{more} was not the same on all ranks of axis "
            f"{self._axis.name!r} at the step after backward {self._told_of}, its norm {', '.join(by_rank)}: "
            f"{self._mend}"
        )


_ALIKE = (
    "decide on steps and rates alike, by sum(tulle.comm.gather_values(loss.item(), mesh['data'], label='loss')) say, "
    "not by the loss of each rank"
)


def _is_watched(step: int) -> bool:
    """Whether replicas are looked at after the backward of this number: a power of two."""
    return step > 0 and not step & (step - 1)


def _is_plain(parameter: Tensor) -> bool:
    return parameter.layout == torch.strided and parameter.numel() > 0


@torch.no_grad()
def _numbers(parameter: Tensor, start: float) -> Tensor:
    """`[2]`: sum and norm, of a large one those of some of its numbers, from `start` between 0 and 1 on."""
    with torch._C.DisableTorchFunctionSubclass():
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(values)
        flat = values.as_strided((values.numel(),), (1,)) if is_dense else values.reshape(-1)
        stride = flat.numel() // _BLOCKS
        if stride > _BLOCK:
            flat = flat[int(start * (stride - _BLOCK)) :].as_strided((_BLOCKS, _BLOCK), (stride, 1))
        some = flat.double().flatten()
        return torch.stack([some.sum(), torch.linalg.vector_norm(some)])


def _tolerance(dtype: torch.dtype) -> float:
    return min(max(_LEAST_TOLERANCE, _ROUNDED * torch.finfo(dtype).eps), _MOST_TOLERANCE)


def _apart(heard: Tensor, tolerances: Tensor) -> Tensor:
    """`[parameters]`: whether ranks differ, by `[ranks, parameters, 3]`: if it was there, sum and norm.

    Example:
        >>> alike, apart = [1.0, 2.0, 3.0], [1.0, 2.1, 3.0]
        >>> heard = torch.tensor([[alike, alike, alike], [alike, apart, [0.0, 0.0, 0.0]]])
        >>> _apart(heard, torch.full((3,), 1e-4)).tolist()
        [False, True, False]
    """
    is_there = heard[..., 0] > 0
    is_finite = heard[..., 1:].isfinite().all(2)
    is_mixed = (is_there & is_finite).any(0) & (is_there & ~is_finite).any(0)
    counted = (is_there & is_finite).unsqueeze(2)
    numbers = heard[..., 1:].nan_to_num()
    most = numbers.where(counted, -torch.inf).amax(0)
    least = numbers.where(counted, torch.inf).amin(0)
    allowed = tolerances * most[:, 1]
    return is_mixed | ((most - least > allowed.unsqueeze(1)).any(1) & counted.any(0).squeeze(1))


def is_bitwise(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaN too."""
    kind = torch.int64 if _is_wide(one) and _is_wide(other) else torch.uint8
    return torch.equal(one.view(kind), other.view(kind))


def _is_wide(tensor: Tensor) -> bool:
    """Whether it lies as eight bytes after eight bytes, which are compared in a seventh of the time of single ones."""
    stretches = tensor.shape[-1] * tensor.itemsize, tensor.storage_offset() * tensor.itemsize
    return tensor.is_contiguous() and not any(stretch % 8 for stretch in stretches)
