"""`step`: makes a function of a model and a batch run on micro-batches, through all stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, overload

from tulle.errors import PlanError
from tulle.pipeline.found import generators_of, models_of
from tulle.pipeline.micro_batch import ITEMS, Split, cut
from tulle.pipeline.outputs import collected
from tulle.pipeline.place import placement_of
from tulle.pipeline.run import Step
from tulle.pipeline.schedule import checked
from tulle.pipeline.unplaced import one_by_one
from tulle.pipeline.usual import micro_batches_of, usual_of

P = ParamSpec("P")


@overload
def step(function: Callable[P, Any], /) -> Callable[P, Any]: ...
@overload
def step(
    *, micro_batches: int | None = None, schedule: str | None = None, split: Split | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def step(
    function: Callable[P, Any] | None = None,
    /,
    *,
    micro_batches: int | None = None,
    schedule: str | None = None,
    split: Split | None = None,
) -> Callable[P, Any] | Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Cut the batch of each call into micro-batches and run the function on each, through all stages of a pipeline.

    The function calls the model, computes the loss and calls `loss.backward()`; gradients are those of the mean over
    the whole batch, if each loss is the mean over its micro-batch. Every rank must call it, with the same batch.
    Optimizers step outside of it. Of a model that is not placed it runs the micro-batches one after the other.

    Args:
        function: The step function, if it is decorated without parentheses: all goes by the plan.
        micro_batches: Into how many the batch is cut; sizes differ by at most one sample. None for what the plan says
            that `tulle.distribute` put on the model, which is 1 if nothing does.
        schedule: `"1f1b"` (a rank holds at most as many micro-batches as there are stages from it to the last),
            `"eager-1f1b"` (one more, begun while it would wait), `"zb-h1"` (as 1F1B, with gradients of weights computed
            where a rank would wait; each keeps something of as many micro-batches as there are stages), or `"gpipe"`
            (all forward, then all backward). None for what the plan says, or `"1f1b"`.
        split: Dimension along which an argument is cut, by its name or `"name.key"`, `"items"` for a list with one item
            a sample (`{"batch.labels": "items"}` for boxes of each picture), or None for one that is not cut. All
            others are cut along dimension 0.

    Returns:
        A decorator, or what it makes of `function`: a function that returns what `function` did, with a `StepOutput`
        for each result.

    Raises:
        PlanError: If there is no such schedule, no positive number of micro-batches, no dimension in `split`, or
            something else than a function.
        DataError: From the call, if the batch cannot be cut so.
        GradientError: From the call, if replicas ran a backward in earlier micro-batches, but not in the last.
        CommunicationError: From the call, if another rank failed, or nothing came from it in time.

    Example:
        >>> import torch, tulle
        >>> from tulle import pipeline
        >>> @pipeline.step(micro_batches=2)
        ... def train_step(model, batch):
        ...     loss = model(batch).pow(2).mean()
        ...     loss.backward()
        ...     return loss
        >>> model = torch.nn.Linear(3, 1)
        >>> train_step(model, torch.zeros(4, 3)).stack().shape
        torch.Size([2])
    """
    if not (function is None or callable(function)):
        raise PlanError(f"step was given {function!r}, expected the step function, or micro_batches={function!r}")
    is_number = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if not (micro_batches is None or (is_number and micro_batches > 0)):
        raise PlanError(f"step was given micro_batches={micro_batches!r}, expected a positive number")
    _check_split(split)
    order = None if schedule is None else checked(schedule)

    def decorate(function: Callable[P, Any]) -> Callable[P, Any]:
        if not callable(function):
            raise PlanError(f"step(...) decorates a step function, but was given {function!r}")

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            models = models_of(function, args, kwargs)
            calls, shares = cut(function, args, kwargs, micro_batches_of(models, micro_batches), split or {})
            placements = [placement for model in models if (placement := placement_of(model))]
            residents = [placement.resident for placement in placements]
            drawn = generators_of(function, args, kwargs) if placements and len(calls) > 1 else []
            whole = Step(function, calls, models, residents, shares, order or usual_of(models).schedule, drawn)
            results = placements[0].runtime.run_step(whole) if placements else one_by_one(whole)
            return collected(results, shares)

        return run

    return decorate if function is None else decorate(function)


def _check_split(split: object) -> None:
    """Raise if it cannot say along which dimensions arguments are cut."""
    if not isinstance(split, Mapping | None):
        raise PlanError(
            f"step was given split={split!r}, expected dimensions by names of arguments: {{'batch': 1}}, say"
        )
    for name, dimension in (split or {}).items():
        is_dimension = isinstance(dimension, int) and not isinstance(dimension, bool)
        if not (isinstance(name, str) and (dimension is None or dimension == ITEMS or is_dimension)):
            raise PlanError(
                f"step was given split={{{name!r}: {dimension!r}}}, expected a dimension, 'items' or None, by a name"
            )
