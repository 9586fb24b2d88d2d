"""`ShardGradient`: the gradient of a rank's part of a parameter, whose norm is that of the whole.

Without it `torch.nn.utils.clip_grad_norm_`, and clipping by hand, would scale every rank's gradients by another factor,
a gradient scaler would skip a step on one rank only, and a norm that is logged would be that of a part:

    p.grad.norm(),  p.grad.detach().pow(2).sum(),  p.grad.abs().max(),  torch.isnan(p.grad).any()
    torch.cat([p.grad.flatten() for p in parameters]).norm()

To optimizers it is a plain tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tulle.comm import all_reduce
from tulle.errors import GradientError
from tulle.mesh import Axis
from tulle.parts import Part, meets_parts
from tulle.reductions import Reduction, Together, norm_of_whole, number_of_whole
from tulle.step_hooks import hook_last
from tulle.torch_functions import BY_NUMBER, PRODUCTS, REDUCED, mixes, name_of, taken_together, tensors_in

FOREACH_NORM = vars(torch)["_foreach_norm"]
UNSCALE = vars(torch)["_amp_foreach_non_finite_check_and_unscale_"]
_LABEL = "gradient norm"
_ON_GRADIENTS = BY_NUMBER | {"detach", "data"}
_LAID_OUT = {"view", "reshape", "flatten", "ravel"}
"""Names of what gives the same numbers in another shape."""
_JOINED = {"cat", "concat", "concatenate", "stack", "hstack"}
"""Names of what puts several gradients together."""
_OF_ALL = {*REDUCED, "dot", "vdot"}
"""Names of what may give one number of all."""
_OF_ROWS = {"matmul", "__matmul__", "mm", "linear"}
"""Names of what gives a row for each row of what it is given first."""
_STORED = {"coalesce", "values", "_values"}
"""Names of what gives the rows that a sparse gradient stores: a gradient scaler looks for infinities in these."""


@meets_parts
@taken_together
class ShardGradient(torch.Tensor):
    """A gradient, dense or sparse, of which every rank of an axis, or of several, has a part.

    What makes one number of all of it (norms, as methods, as functions, and as gradient clipping takes them; sums;
    the largest; whether any or all are), and the check for infinities of a gradient scaler, is over all ranks: every
    rank must ask. What mixes numbers along a dimension that is cut is refused; other operations see a plain tensor.
    """

    axes: tuple[Axis, ...]
    count: int | None = None
    """Numbers in the whole; None if parts have places that stay empty."""
    cuts: tuple[int, ...] = ()
    """The dimensions that are; none if what goes along them is not to be looked at."""
    is_mixed: bool = False
    """Whether whole gradients were put together with it, of which no number over all ranks is right."""

    @classmethod
    def of(
        cls, gradient: Tensor, axes: Sequence[Axis], count: int | None = None, *, cuts: Sequence[int] = ()
    ) -> ShardGradient:
        """Turn a plain gradient into one; it stays the object that it is."""
        gradient.__class__ = cls  # as_subclass refuses sparse tensors
        assert isinstance(gradient, ShardGradient), "just made so"
        gradient.axes = tuple(axes)
        gradient.count = count
        gradient.cuts = tuple(cuts)
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all operations but those see plain tensors."""
        if any(not issubclass(kind, ShardGradient) for kind in types):
            return NotImplemented  # a gradient that is still under way comes first
        keywords = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
        if func is UNSCALE:
            for axis in axes_of(args[0]):
                all_reduce(args[1], axis, label=_LABEL, op="max").wait()
            return result
        return over_ranks(func, args, keywords, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor of the same numbers."""
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)


class _Plainly:
    """Hooks of an optimizer's step, in which gradients of parts are plain: the class takes its time at each operation.

    Hooks of others are to see the class: the one after the step is the first, and the one before it does nothing unless
    it is among the last.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        hook_last(optimizer, self._before)
        after = optimizer.register_step_post_hook(self._after).id
        cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(after, last=False)
        self._plain: list[Tensor] = []

    def _before(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any], others_behind: int
    ) -> None:
        self._plain.clear()
        if not others_behind and len(arguments) == 1 and not keywords:
            gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
            self._plain += [gradient for gradient in gradients if type(gradient) is ShardGradient]
            for gradient in self._plain:
                gradient.__class__ = Tensor

    def _after(self, *_: object) -> None:
        for gradient in self._plain:
            gradient.__class__ = ShardGradient
        self._plain.clear()


def step_by_plain_gradients(optimizer: Optimizer) -> None:
    """Have gradients of parts be plain tensors while an optimizer steps that treats every number by itself."""
    if any(isinstance(parameter, Part) for group in optimizer.param_groups for parameter in group["params"]):
        _Plainly(optimizer)


def over_ranks(func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Any:
    """What a function gives of whole gradients, if it gave `result` of parts. Every rank of their axis must call it.

    Raises:
        GradientError: If it mixed numbers along the dimension that is cut.
    """
    if (order := order_of_norms(func, args, keywords)) is not None and func is FOREACH_NORM:
        return norms_over_ranks(args[0], result, order)
    gradient, name = args[0] if args else None, name_of(func)
    if isinstance(gradient, list | tuple) and name in _JOINED and any(isinstance(g, ShardGradient) for g in gradient):
        return _joined(gradient, result)
    if name in PRODUCTS:
        _check_products(name, args)
    if not isinstance(gradient, ShardGradient):
        return result
    with torch._C.DisableTorchFunctionSubclass():
        mixed = next((cut for cut in gradient.cuts if mixes(name, gradient, cut, args, keywords)), None)
    if mixed is not None:
        _refuse_along(name, gradient, mixed)
    if isinstance(result, tuple) and name in REDUCED and not result[0].dim():  # aminmax, var_mean
        _refuse_unknown(name, gradient)
    if not isinstance(result, Tensor) or type(result) is not Tensor:
        return result
    is_by_number = name in _ON_GRADIENTS and result.shape == gradient.shape and "out" not in keywords
    if is_by_number or name in _STORED:
        return _like(gradient, result, gradient.cuts)
    if name in _LAID_OUT and result.dim():
        cuts = gradient.cuts if result.dim() == gradient.dim() == 1 else (0,) if result.dim() == 1 else ()
        return _like(gradient, result, cuts if gradient.cuts else ())
    return result if result.dim() or not gradient.dim() else _of_all(name, gradient, args, keywords, result)


def _of_all(
    name: str, gradient: ShardGradient, args: Sequence[Any], keywords: Mapping[str, Any], result: Tensor
) -> Tensor:
    """One number of all of a gradient, from that of its part.

    Raises:
        GradientError: If that is not known.
    """
    _check_not_mixed(name, gradient)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = number_of_whole(name, gradient, args, keywords, result, _together(gradient.axes, gradient.count))
    if found is None and name in REDUCED:
        _refuse_unknown(name, gradient)
    return result if found is None else found


def _check_products(name: str, args: Sequence[Any]) -> None:
    """Raise if what is turned, or multiplied by a matrix, is a part, unless each whole row is by itself."""
    for place, one in enumerate(tensors_in(args)):
        is_by_row = place == 0 and name in _OF_ROWS and one.dim() > 1
        if isinstance(one, ShardGradient) and one.cuts and not (is_by_row and one.cuts == (0,)):
            _refuse_along(name, one, one.cuts[0])


def _refuse_along(name: str, gradient: ShardGradient, cut: int) -> NoReturn:
    raise GradientError(
        f"{name} was asked of a gradient along dimension {cut}, of which this rank has a part, "
        f"{list(gradient.shape)}: norms, sums and the like of all of it are known, along that dimension none are. "
        "Take a plan that leaves the parameter whole; .clone() gives this rank's part"
    )


def _refuse_unknown(name: str, gradient: ShardGradient) -> NoReturn:
    raise GradientError(
        f"{name} was asked of a gradient of which this rank has a part, {list(gradient.shape)}, and what it is of "
        "the whole is not known: norms, sums and the largest are; .clone() gives this rank's part"
    )


def axes_of(gradients: Iterable[Tensor]) -> list[Axis]:
    """The axes over which some gradients are shared out, each once; the same, in their order, on all ranks."""
    axes = (axis for gradient in gradients if isinstance(gradient, ShardGradient) for axis in gradient.axes)
    return [*{axis.ranks: axis for axis in axes}.values()]


def _together(axes: Sequence[Axis], count: int | None) -> Together:
    def over(number: Tensor, op: Reduction) -> Tensor:
        for axis in axes:
            number = all_reduce(number.clone(), axis, label=_LABEL, op=op).wait()
        return number

    return Together(over, count)


def _like(gradient: ShardGradient, result: Tensor, cuts: Sequence[int]) -> ShardGradient:
    """What became of a gradient of a part, number by number."""
    made = ShardGradient.of(result, gradient.axes, gradient.count, cuts=cuts)
    made.is_mixed = gradient.is_mixed
    return made


def _joined(gradients: Sequence[Tensor], result: Tensor) -> ShardGradient:
    """Several gradients in one tensor."""
    shards = [gradient for gradient in gradients if isinstance(gradient, ShardGradient)]
    axes, counts = shards[0].axes, [shard.count for shard in shards]
    count = None if None in counts else sum(count or 0 for count in counts)
    made = ShardGradient.of(result, axes, count)
    is_other = any(shard.is_mixed or _ranks(shard) != _ranks(shards[0]) for shard in shards)
    made.is_mixed = is_other or len(shards) < len(gradients)
    return made


def _check_not_mixed(name: str, gradient: ShardGradient) -> None:
    if gradient.is_mixed and name in _OF_ALL:
        raise GradientError(
            f"{name} was asked of gradients that were put together, of some of which this rank has a part and of "
            "others all: take it of each, torch.stack([p.grad.norm() for p in parameters]).norm() say, or "
            "tulle.clip_grad_norm_; .clone() gives what this rank has"
        )


def order_of_norms(func: object, args: Sequence[Any], keywords: Mapping[str, Any]) -> float | None:
    """The order, if a call takes norms as torch's clipping does (`_foreach_norm`, `vector_norm`); else None."""
    if func is not FOREACH_NORM and not (func is torch.linalg.vector_norm and len(args) + len(keywords) <= 2):
        return None
    return float(args[1] if len(args) > 1 else keywords.get("ord", 2))


def norms_over_ranks(gradients: Sequence[Tensor], norms: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms of which those of parts are replaced by those of the wholes; one all-reduce an axis for all alike."""
    found, alike = [*norms], dict[tuple[tuple[int, ...], ...], list[int]]()
    for t, gradient in enumerate(gradients):
        if isinstance(gradient, ShardGradient):
            _check_not_mixed("norm", gradient)
            alike.setdefault(_ranks(gradient), []).append(t)
    for parts in alike.values():
        together = _together(cast("ShardGradient", gradients[parts[0]]).axes, None)
        whole = norm_of_whole(torch.stack([norms[t] for t in parts]), order, together)
        for t, norm in zip(parts, whole.unbind(), strict=True):
            found[t] = norm
    return found


def _ranks(gradient: ShardGradient) -> tuple[tuple[int, ...], ...]:
    return tuple(axis.ranks for axis in gradient.axes)
