"""`watch_kinds`: optimizers that are made after `distribute` are held to what those that are given to it are."""

from __future__ import annotations

import logging
from functools import cache
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tulle.clip import spread_of
from tulle.distribute.whole_states import take_wholes_later
from tulle.engine import ENGINE
from tulle.errors import ModelError
from tulle.tables import split_of, step_plainly
from tulle.traits import ELEMENTWISE, doubt, has_hooks, is_elementwise, is_of_wholes

logger = logging.getLogger("tulle")
_doubted: WeakSet[Optimizer] = WeakSet()
"""Optimizers of which it was said that nothing is known of them."""
_groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How many groups of parameters those had that were looked at."""


@cache
def watch_kinds() -> None:
    """Look at the steps of all optimizers of this process from now on, also of those that will be made."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, *_: object) -> None:
    """Raise if an optimizer needs the whole of a parameter of which this rank has a part; doubt one that is not known.

    Raises:
        ModelError: Naming the optimizer.
    """
    kind = type(optimizer)
    if has_hooks(optimizer) and _groups.get(optimizer) != len(optimizer.param_groups):
        _groups[optimizer] = len(optimizer.param_groups)
        step_plainly(optimizer, is_elementwise=is_elementwise(optimizer))
    if ENGINE in vars(optimizer):  # those that distribute was given have been looked at
        return
    take_wholes_later(optimizer)
    if is_elementwise(optimizer):
        return
    part = next((p for group in optimizer.param_groups for p in group["params"] if _is_partial(p, kind)), None)
    if part is None:
        return
    has = f"a rank has a part only of what it steps, of shape {list(part.shape)} here"
    if is_of_wholes(kind):
        raise ModelError(
            f"{kind.__name__} does not treat every element by itself, and {has}: the plan splits tables or layers, or "
            f"has full_shard. Use one of {', '.join(one.__name__ for one in ELEMENTWISE)}, or another plan"
        )
    if optimizer not in _doubted:
        _doubted.add(optimizer)
        logger.info("%s: %s", doubt(kind), has)


def _is_partial(parameter: Tensor, kind: type[Optimizer]) -> bool:
    """Whether an optimizer of a kind would need what this rank does not have."""
    spread = spread_of(parameter)
    return split_of(parameter) is not None or (spread is not None and (spread.is_part or kind is LBFGS))
