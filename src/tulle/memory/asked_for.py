"""`asked_for`: the wholes whose gradients the backward of an `autograd.Function` asks for by `torch.autograd.grad`.

    forward     whole -> Function.apply(run, x, *module.parameters())
    backward    run(x) again, torch.autograd.grad(y, (x, *parameters), allow_unused=True)

So do the adjoint of an ODE (torchdiffeq) and the checkpoints of diffusion models (guided-diffusion). A module that runs
again must have the very wholes of forward: of others, gathered anew, nobody asks, and torch gives None in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_autograd: Any = vars(torch._C)["_autograd"]
_KEY = "tulle_gathered"


class _Given(NamedTuple):
    """What one gathering gave; by whom it is held is not ours."""

    parts: Sequence[nn.Parameter]
    wholes: Sequence[ref[Tensor]]


def keep_in_mind(wholes: Sequence[Tensor], parts: Sequence[nn.Parameter]) -> None:
    """Have the operation that gathered know its wholes for `asked_for`."""
    node: Any = next((whole.grad_fn for whole in wholes if whole.grad_fn is not None), None)
    if node is not None:
        node.metadata[_KEY] = _Given(parts, [ref(whole) for whole in wholes])


def asked_for(parts: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    """By their numbers, the wholes of parts that were given to the function whose backward runs, and were kept."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction) or not torch.is_grad_enabled() or _is_recomputed():
        return {}
    numbers = {id(part): number for number, part in enumerate(parts)}
    found: dict[int, Tensor] = {}
    for function, output in node.next_functions:
        given: _Given | None = function.metadata.get(_KEY) if function is not None else None
        number = numbers.get(id(given.parts[output])) if given is not None else None
        if given is not None and number is not None:
            # Saved ones first: whether others are there still may hang on the garbage collector of each rank.
            saved = _saved(node, function, output)
            whole = given.wholes[output]() if saved is None else saved
            if whole is not None:
                found[number] = whole
    return found


def _saved(node: Any, function: Any, output: int) -> Tensor | None:
    saved = (tensor for tensor in node.saved_tensors if tensor is not None)
    return next((tensor for tensor in saved if tensor.grad_fn is function and tensor.output_nr == output), None)


def _is_recomputed() -> bool:
    """Whether `torch.utils.checkpoint` computes again what a function has saved, for which gathering anew is right."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "recomputation" in hooks[0].__qualname__
