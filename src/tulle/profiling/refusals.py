"""What cannot be profiled, told on every rank alike: what is no model or sample, a model that does not run on one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import gather_values, raise_together
from tulle.errors import MeshError, ModelError, TulleError, raised_in
from tulle.mesh import Axis, Mesh
from tulle.profiling.samples import apart

LABEL = "the profile"
T = TypeVar("T")


def check_arguments(model: object, optimizer: object, mesh: object, loss: object, further: object = ()) -> None:
    """Check what a profile was given, but for the sample, which may be anything that the model takes.

    Raises:
        ModelError: Saying what was given and what was expected.
        MeshError: Of the mesh.
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    wrong = [one for one in optimizers if not isinstance(one, Optimizer)]
    if not isinstance(model, nn.Module):
        raise ModelError(f"tulle.profile was given a {type(model).__name__} as model, expected a torch.nn.Module")
    if wrong:
        raise ModelError(
            f"tulle.profile was given a {type(wrong[0]).__name__} as optimizer, "
            "expected a torch.optim.Optimizer or a list of them"
        )
    if not (mesh is None or isinstance(mesh, Mesh)):
        raise MeshError(f"tulle.profile was given a {type(mesh).__name__} as mesh, expected what tulle.init returns")
    if not isinstance(further, Sequence) or isinstance(further, str):  # a batch of them is one sample
        raise ModelError(f"tulle.profile was given a {type(further).__name__} as further, expected a list of samples")
    if not (loss is None or callable(loss)):
        raise ModelError(f"tulle.profile was given loss={loss!r}, expected a function from the model's result to it")


def check_trains(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that there is a step to measure: parameters that are trained, by optimizers that step without a closure.

    Raises:
        ModelError: Saying which is not so.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = "are all frozen" if any(True for _ in model.parameters()) else "are none"
        raise ModelError(
            f"tulle.profile measures a training step, and the parameters of this {type(model).__name__} {what}: "
            "let some have requires_grad=True, as they will have in training"
        )
    for optimizer in optimizers:
        steps_with = [*inspect.signature(type(optimizer).step).parameters.values()][1:]
        if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in steps_with):
            raise ModelError(
                f"tulle.profile measures optimizers that step by themselves, and {type(optimizer).__name__}.step() "
                f"asks for a {steps_with[0].name}, which runs the model as often as it likes: profile the model with "
                "torch.optim.SGD, or distribute it with a plan of your own, plan=tulle.Plan(...)"
            )


def check_as_many(samples: Sequence[object], axis: Axis) -> None:
    """Check that all ranks have as many samples, on each of which all step at once. Every rank must call it.

    Raises:
        ModelError: On every rank, if they have not.
    """
    counts = gather_values(len(samples), axis, label=LABEL)
    if len({*counts}) > 1:
        raise ModelError(
            f"tulle.profile was given {', '.join(map(str, counts))} samples on ranks 0 to {axis.size - 1}, with those "
            "of further=: give each rank as many"
        )


def together(work: Callable[[], T], model: nn.Module, sample: object, axis: Axis) -> T:
    """What some work on every rank gives; raises on all what it raises on any. Every rank of the axis must call it.

    Args:
        work: Runs the model.
        model: Named by the error, with where in its code it was.
        sample: On which it runs.
        axis: Of these ranks.

    Raises:
        ModelError: If the work raises what is no error of tulle's.
    """
    error: TulleError | None = None
    result: T | None = None
    try:
        result = work()
    except TulleError as found:
        error = found
    except Exception as found:
        has_tensors = any(isinstance(leaf, Tensor) for leaf in apart(sample)[0])
        shown = "" if has_tensors else f", a {type(sample).__name__} without a tensor"
        error = ModelError(
            f"a {type(model).__name__} could not be profiled on the sample{shown}, because {type(found).__name__}: "
            f"{found}{raised_in(found)}. Give a sample as the model is called with it (of a pair of inputs and targets "
            "the inputs, if forward takes these alone); tulle.profile takes loss= for a model that gives no tensors"
        )
        error.__cause__ = found
    raise_together(error, axis, label=LABEL)
    return cast("T", result)
