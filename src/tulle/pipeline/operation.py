"""`Call`: one operation or placed module that a program runs; and what such a one, or backward, must not be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.parts import is_transformed
from tulle.pipeline.counted import apart
from tulle.pipeline.holdings import Holdings, Unit
from tulle.pipeline.leaves import leaves_of
from tulle.pipeline.outcome import Outcome
from tulle.pipeline.parted import wholes_to_join
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.sending import waits_for_others
from tulle.pipeline.shapes import GRADIENT
from tulle.pipeline.structure import Spec, rebuild_call
from tulle.pipeline.tape import Tape
from tulle.pipeline.values import Values

SETS_TRAINED = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
"""Operations that set whether a parameter is trained."""
SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SETS_GRADIENT = Tensor.grad.__set__  # type: ignore[attr-defined]
_OF_LEAVES = (Tensor.is_leaf.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


@dataclass(slots=True)
class Call:
    """One operation of a program.

    Args:
        function: What runs.
        leaves: Of its arguments `(args, kwargs)`.
        spec: How these are put together.
        name: Of the operation or the module.
        unit: The module, if it is one that is placed.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Spec
    name: str
    unit: Unit | None = None

    @property
    def placeholders(self) -> list[Placeholder]:
        """Its arguments that live on one rank."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Placeholder)]

    def natives(self, values: Values, stage: int | None) -> list[Any]:
        """Its arguments with tensors instead of placeholders.

        Args:
            values: Has them.
            stage: Where tensors can be had that were not brought; None for all stages of this rank.
        """
        natives, known = list(self.leaves), dict[int, Tensor]()
        for number, leaf in enumerate(natives):
            if isinstance(leaf, Placeholder):
                native = known.get(id(leaf))
                natives[number] = known[id(leaf)] = values.native(leaf) if native is None else native
        return natives if self.unit is not None else apart(self.function, wholes_to_join(self.name, natives))

    def arguments(self, natives: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with."""
        return rebuild_call(self.spec, natives)

    def prepare(self, tape: Tape, *, is_first: bool, holdings: Holdings | None) -> None:
        """It is about to run here.

        Args:
            tape: Of this rank.
            is_first: Whether it is the first call of the operation or module in this program.
            holdings: What lives where, if the outcome is not known.
        """

    def is_plain(self, tape: Tape, *, is_first: bool) -> bool:
        """Whether it is a module's, and needs nothing of what `prepare` puts around one.

        Args:
            tape: Of this rank.
            is_first: Whether it is the module's first call of this program.
        """
        return False

    def read(self, leaf: Placeholder) -> None:
        """What runs reads a placeholder."""

    def written(self, outcome: Outcome | None) -> int | None:
        """Number of the argument that an operation writes in, or None."""
        if outcome is not None:
            return outcome.written[0] if outcome.written else None
        name = self.name
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in (
            "__setitem__",
            "__iadd__",
            "__imul__",
        )
        return 0 if is_in_place and isinstance(self.leaves[0], Tensor) else None


def is_for_all(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a parameter is set to be trained or not, or to have no gradient, or is asked whether it is a leaf.

    All ranks do that alike.
    """
    if not isinstance(args[0] if args else None, nn.Parameter):
        return False
    return function in SETS_TRAINED or function in _OF_LEAVES or (function == _SETS_GRADIENT and args[1] is None)


def dealt_out(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], home_of: Callable[[Tensor], int | None]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of an operation that writes in each of many tensors (`torch._foreach_mul_`), one for each stage.

    At one stage it would write in copies of what lives at others, such as gradients that are clipped.

    Args:
        args: Of the operation; the first are the tensors.
        kwargs: Of the operation.
        home_of: Gives the stage where one of them lives, or None.

    Example:
        >>> dealt_out((["a", "b", "c"], [1, 2, 3]), {"alpha": 2}, home_of=lambda tensor: int(tensor == "b"))
        [((['a', 'c'], [1, 3]), {'alpha': 2}), ((['b'], [2]), {'alpha': 2})]
    """
    homes = list(map(home_of, args[0]))

    def part(given: Any, home: int | None) -> Any:
        if not isinstance(given, list | tuple) or len(given) != len(homes):
            return given
        return [one for one, at in zip(given, homes, strict=True) if at == home]

    return [
        (tuple(part(one, home) for one in args), {key: part(one, home) for key, one in kwargs.items()})
        for home in dict.fromkeys(homes)
    ]


def check_asks(function: Callable[..., Any], args: Sequence[Any], placeholders: Sequence[Placeholder]) -> None:
    """Refuse to ask for gradients that may lie on several ranks; those of a parameter are at its own.

    Hooks, too: those of a parameter would see other micro-batches, which run meanwhile.
    """
    if function in _HOOKS and args[0].requires_grad:
        raise ModelError(
            f"{function.__name__}() was called between modules of a pipeline, on a tensor of shape "
            f"{list(args[0].shape)}: each rank has only a part of such gradients, and micro-batches share a "
            "parameter's. Put hooks on parameters before the step, and on other tensors inside one module"
        )
    is_refused = not placeholders and function == GRADIENT and args[0].is_leaf and args[0].requires_grad
    if is_refused or (function is torch.autograd.grad and placeholders):
        asked = "torch.autograd.grad" if placeholders else f".grad of a tensor of shape {list(args[0].shape)}"
        raise ModelError(
            f"code between modules of a pipeline asks for gradients by {asked}, of which each rank has only a part. "
            "For those of parameters take loss.backward(), and set .grad afterwards; of a tensor of your own take "
            ".grad when the step, or loss.backward() outside of steps, is over; ask for others inside one module"
        )


def check_sends(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], axis: Axis) -> None:
    """Refuse a collective on what lives at one stage: its rank would wait for those that do not come."""
    if waits_for_others(function, args, kwargs, axis.ranks):
        raise ModelError(
            f"{function.__name__}() of torch.distributed was called between modules of a pipeline on a tensor that "
            f"lives at one stage, whose rank alone of axis {axis.name!r} runs it, and would wait for the others: "
            "reduce what the step gives after it (losses.mean()), give a group of the ranks of other axes "
            '(group=mesh["data"].group), or take its number before (x.item()), which all ranks have'
        )


def set_data(operate: Callable[..., Any], tensor: Tensor, values: Tensor, *, is_placed: bool) -> None:
    """Do what `tensor.data = values` does as a write where the tensor lives, of which all ranks can be told.

    Args:
        operate: Runs an operation between modules.
        tensor: A parameter or buffer of a model, or the user's own.
        values: What it is to hold.
        is_placed: Whether it lives on one rank.
    """
    before, after = ((one.dtype, list(one.shape)) for one in (tensor, values))
    if before != after:
        raise ModelError(
            f"a forward makes a parameter of {before[0]} one of {after[0]}, of shape {before[1]} and {after[1]}, which "
            "other stages would not see: convert the module (.to(...)) before it is placed"
        )
    with torch.no_grad():
        target = operate(Tensor.data.__get__, (tensor,), {}) if is_placed else tensor  # type: ignore[attr-defined]
        operate(Tensor.copy_, (target, values), {})


def check_given(call: Call, holdings: Holdings) -> list[Tensor]:
    """Refuse what must not be beside tensors of some stage: it differs between ranks, or would from now on.

    Returns:
        Leaves of autograd that its tensors are or were computed of on all ranks, and that live at no stage.
    """
    found: list[Tensor] = []
    for leaf in call.leaves:
        if isinstance(leaf, Placeholder) or not isinstance(leaf, Tensor):
            continue
        if leaf.is_meta:
            raise ModelError(
                f"{call.name!r} was given a tensor of shape {list(leaf.shape)} on device meta, as parameters are "
                "where they do not live, and copies of these that were made outside of tulle.step (.clone()): make "
                "tensors on mesh.device, and compute with parameters within tulle.step"
            )
        if leaf.requires_grad and torch.is_grad_enabled():
            found += [one for one in leaves_of(leaf) if id(one) not in holdings.stages]
    for one in found:
        if isinstance(one, nn.Parameter):
            given = "" if any(one is leaf for leaf in call.leaves) else "what is computed of "
            raise ModelError(
                f"{call.name!r} was given {given}a parameter of shape {list(one.shape)} that is trained and in no "
                "model that was placed, so that one rank only would train it: place its module too "
                '(at {"": stage}), or make it a part of the model before that is placed. A model that has another '
                "layer or an adapter since is to be made anew from tulle.full_state_dict(model, everywhere=True), and "
                "distributed"
            )
    return found


def check_nested(name: str, leaves: Sequence[object]) -> None:
    """Refuse what a module is given, or it or an operation gives, if its shape is told by values.

    Args:
        name: Of the module or operation.
        leaves: Of its arguments, or of its result.
    """
    for leaf in leaves:
        if isinstance(leaf, Placeholder) or not isinstance(leaf, Tensor) or not leaf.is_nested:
            continue
        raise ModelError(
            f"a nested tensor (torch.nested) goes to {name!r}, or comes from it, between modules of a pipeline, where "
            "shapes are to be known without values: make it and take it apart inside one module that is placed whole, "
            "or pad"
        )


def check_family(target: object, phase: object, *, by: str) -> None:
    """Refuse to write in memory of which gradients are told apart by now.

    Args:
        target: What is written in.
        phase: Of the tape, that is being recorded.
        by: Name of the operation.
    """
    if not isinstance(target, Placeholder) or not target.family.has_others:
        return
    members = target.family.with_all(target)
    crosses = any(one.needs_grad and one.local is not None and one.phase not in (None, phase) for one in members)
    if crosses and torch.is_grad_enabled():
        raise ModelError(
            f"the operation {by!r} writes in {target!r}, of which there are views, after the stage has received other "
            "values: gradients could not follow; write in a copy (.clone()) or inside one module"
        )


def check_transform(name: str) -> None:
    """Refuse a call of a placed module within a transform of `torch.func`, which its rank would run without the others.

    Args:
        name: Of the module.
    """
    if is_transformed():
        raise ModelError(
            f"the placed module {name!r} is called within a transform of torch.func (grad, jvp, vmap), which one rank "
            "would run without the others: do both inside one module that is placed whole; for gradients of parameters "
            "take loss.backward() in a step"
        )


def check_backward(losses: Sequence[Any], gradients: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse a backward that cannot run over stages, or begin at these losses.

    Args:
        losses: What it is to begin at.
        gradients: Of each, or None.
        options: Of `torch.autograd.backward`.
    """
    if options.get("create_graph") or options.get("inputs") is not None:
        raise ModelError(
            "backward through a pipeline was asked for create_graph or inputs; only plain loss.backward() can run "
            "over stages: compute such gradients inside one module"
        )
    for loss, gradient in zip(losses, gradients, strict=True):
        if not isinstance(loss, Placeholder) or not loss.needs_grad:
            raise ModelError("backward was called on a tensor of a pipeline that needs no gradient: see requires_grad")
        if gradient is None and loss.numel() != 1:
            raise ModelError(
                f"backward was called on a tensor of shape {list(loss.shape)}: give its gradient, or sum it"
            )
