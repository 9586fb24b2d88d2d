"""`Reached`: tensors that a placed module reads past its arguments, and that earlier calls have left for it.

A cache of keys and values, or whatever else keeps tensors in an object of the user's own, is no argument that the tape
could see. What such an object holds may come of an earlier phase, whose backward is another:

    phase 0   cache.k = k           backward: 2. gradients of k, from the cut too
    phase 1   ◀─ receive x          1. those of the cut, by x's reader
              cat([cache.k, ...])   k was made in phase 0: cut

autograd numbers its nodes in the order in which a thread makes them, which tells of which phase a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tulle.comm import eager
from tulle.errors import ModelError
from tulle.pipeline.holdings import Holdings, Unit
from tulle.pipeline.placeholder import Placeholder, is_about_shape
from tulle.pipeline.sending import waits_for_others
from tulle.pipeline.structure import flatten, is_atom, rebuild
from tulle.pipeline.tape import Tape
from tulle.traits import is_compiled


def cut_where_reached(
    function: Callable[..., Any], unit: Unit, leaves: Sequence[Any], tape: Tape, *, is_first: bool
) -> Callable[..., Any]:
    """What runs a placed module, and cuts the tape at tensors of earlier phases that it reads past its arguments.

    It can have such where it has run before, or is given an object that is not taken apart. Compiled modules are left
    alone.

    Args:
        function: What runs it.
        unit: The module.
        leaves: Of its arguments.
        tape: Of the rank.
        is_first: Whether it is the module's first call of this program.
    """
    if not torch.is_grad_enabled() or (is_first and all(map(is_atom, leaves))):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(tape.phases) == 1 or _is_compiled(unit):
            return function(*args, **kwargs)
        with Reached(tape) as reached:
            result = function(*args, **kwargs)
            reached.check()
            return reached.of_this_phase(result)

    return run


def absent_refused(function: Callable[..., Any], unit: Unit, holdings: Holdings) -> Callable[..., Any]:
    """What runs a placed module, and refuses what lives at other stages and is read past its arguments.

    On a CPU torch multiplies a tensor with one on `meta`, and gives whatever lay in memory. It is for a module's first
    call with arguments of such shapes: each operation is looked at. Compiled modules are left alone. Collectives with
    ranks of other stages, which do not run the module, are refused, too.

    Args:
        function: What runs it.
        unit: The module.
        holdings: What lives where.
    """
    if _is_compiled(unit):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with _AbsentRefused(unit, holdings):
            return function(*args, **kwargs)

    return run


class _AbsentRefused(TorchFunctionMode):
    def __init__(self, unit: Unit, holdings: Holdings) -> None:
        super().__init__()
        self._unit, self._stages, self._axis = unit, holdings.stages, holdings.mailbox.axis

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of the module."""
        if not is_about_shape(func) and not _is_property(func):
            self._check(getattr(func, "__name__", str(func)), flatten((args, kwargs))[0])
            self._check_sends(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @eager
    def _check_sends(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if waits_for_others(function, args, kwargs, self._axis.ranks):
            raise ModelError(
                f"{self._unit.name!r} calls {function.__name__}() of torch.distributed, but along axis "
                f"{self._axis.name!r} one rank alone runs it, and would wait for the others: have it send to none, or "
                'to a group of the ranks of other axes (group=mesh["data"].group)'
            )

    @eager
    def _check(self, name: str, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in self._stages and leaf.is_meta:
                raise ModelError(
                    f"the operation {name!r} in {self._unit.name!r} reads a parameter or buffer of shape "
                    f"{list(leaf.shape)}, which lives at stage {self._stages[id(leaf)]}, and which the module was not "
                    "given as an argument: pass it as one, or place both at one stage"
                )


class Reached(TorchFunctionMode):
    """Gives operations a cut instead of a tensor of an earlier phase.

    Args:
        tape: Where it is cut.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._cuts: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By identity of a tensor: it, what stands for it, and how often it was written in before."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of the module."""
        return self._operate(func, args, kwargs or {})

    def of_this_phase(self, value: Any) -> Any:
        """The same value with what stands in this phase for tensors of earlier ones."""
        leaves, spec = flatten(value)
        cut = [self._cut(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return value if all(one is other for one, other in zip(leaves, cut, strict=True)) else rebuild(spec, cut)

    def check(self) -> None:
        """Refuse what was written in a tensor for which another stands here.

        Raises:
            ModelError: If something was.
        """
        for tensor, _, version in self._cuts.values():
            if tensor._version != version:
                raise written_past(tensor)

    @eager
    def _operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and not is_about_shape(function) and not _is_property(function):
            args, kwargs = self.of_this_phase((args, kwargs))
        return function(*args, **kwargs)

    def _cut(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder) or not tensor.requires_grad:
            return tensor
        known = self._cuts.get(id(tensor))
        if known is None:
            phase = self._tape.phase_of(tensor)
            if phase is self._tape.phase:
                return tensor
            known = self._cuts[id(tensor)] = tensor, self._tape.cut(tensor, phase, is_leaf=False), tensor._version
        return known[1]


def written_past(tensor: Tensor) -> ModelError:
    """What is said of a module that writes in what an earlier call has left."""
    return ModelError(
        f"it writes in a tensor of shape {list(tensor.shape)} that an earlier call left in an object or attribute, "
        "past which the stage has received other values: gradients could not follow; put a new tensor in its place, "
        "as torch.cat makes one, or write in a copy (.clone())"
    )


def _is_property(function: Callable[..., Any]) -> bool:
    """Whether something is asked of the tensor itself that its history tells, such as `.grad_fn`, or set in it."""
    return getattr(function, "__name__", "") in ("__get__", "__set__", "retain_grad", "register_hook")


def _is_compiled(unit: Unit) -> bool:
    """Whether the compiler would trace what looks on."""
    inner = (module for module in unit.module.modules() if module is not unit.module)
    return unit.compiled is not None or any(map(is_compiled, inner))
