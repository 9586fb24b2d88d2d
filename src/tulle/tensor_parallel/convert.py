"""`apply`: splits the layers of a model over an axis; `enabled`: those of models that are made within a context."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.nn.modules import module as hooks

from tulle.errors import ModelError
from tulle.mesh import Axis, check_axis
from tulle.names import as_names
from tulle.tensor_parallel.check import check_equal
from tulle.tensor_parallel.joined import joined
from tulle.tensor_parallel.known import Known
from tulle.tensor_parallel.loss import CausalLoss
from tulle.tensor_parallel.registry import factory_of
from tulle.tensor_parallel.walk import Select, Walk, is_small, moves_of
from tulle.traits import attribute_of

SMALLEST_BYTES = 1024 * 1024
"""A layer that stands alone is split from this size on: below, what travels costs more than it saves."""
M = TypeVar("M", bound=nn.Module)


def apply(  # noqa: PLR0913 - what is split, how, and its check
    model: M,
    axis: Axis,
    *,
    select: Select | None = None,
    sequence: bool = False,
    smallest_bytes: int = SMALLEST_BYTES,
    leave: Collection[str] = (),
    sample: object = None,
    check: bool = False,
) -> M:
    """Split the layers of a model over the ranks of an axis, in place. Every rank of the axis must call it, alike.

    Ranks of the axis then call the model with the same batch, and get what one process would: loss, gradients and
    parameters, whose parts they hold. `state_dict()` gives whole tensors under their own names, so every rank of the
    axis must call it; `load_state_dict` takes whole tensors. Parameters stay the same objects: an optimizer made
    before goes on, if it has not stepped.

    Args:
        model: The same weights on every rank of the axis: those of rank 0 are not sent.
        axis: `mesh["model"]`, say.
        select: Which modules. None for all whose class is registered; patterns such as `"encoder.layers.*"` for
            those in or at such names; a mapping from pattern to `"auto"`, `"whole"`, `"column"` (output features stay
            split, for a `"row"` layer to take), `"row"`, or `"vocabulary"` (an embedding by rows, an output layer
            whose scores stay split for `cross_entropy`; the own loss of a causal language model of `transformers` is
            then computed so). The last pattern that matches counts.
        sequence: Whether activations between the layers of a stack are split along sequences, so that norms, dropout
            and residual sums are too. Lengths must then divide evenly.
        smallest_bytes: Without `select`, `nn.Linear` and `nn.Embedding` that stand alone stay whole below this size.
        leave: Names of modules that stay whole, whatever `select` says.
        sample: One batch, as the model is called with it, for `check`.
        check: Whether to compare results and gradients for the sample with those of the whole model on this device.

    Returns:
        The model that was given. After an error it is of no use.

    Raises:
        MeshError: If `axis` is not an axis.
        ModelError: If a pattern matches nothing that can be split, heads do not divide among the ranks, a parameter
            is tied to one that stays whole, or the check finds a difference, naming it.

    Example:
        >>> import torch, tulle
        >>> axis = tulle.init(model=-1)["model"]
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> layer = apply(layer, axis, sample=torch.ones(1, 3, 8), check=True)
        >>> layer(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """
    check_axis(axis, by="tensor_parallel.apply")
    if not isinstance(model, nn.Module):
        raise ModelError(f"tensor_parallel.apply was given a {type(model).__name__}, expected a torch.nn.Module")
    if check and sample is None:
        raise ModelError("tensor_parallel.apply was given check=True without a sample: give one batch as sample=")
    walk = Walk(axis, moves_of(select), sequence, smallest_bytes, as_names(leave))
    if axis.size > 1:
        with check_equal(model, axis, sample if check else None):
            _split([model], walk)
    return model


def known(model: nn.Module, *, smallest_bytes: int = SMALLEST_BYTES, ranks: int = 1) -> list[str]:
    """Names of the modules that `apply` would split without `select`: the outermost of registered classes, and layers.

    Args:
        model: Not split yet.
        smallest_bytes: As in `apply`.
        ranks: Of the axis.

    Example:
        >>> import torch
        >>> known(torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16), torch.nn.ReLU()))
        ['0']
    """
    found, code, together = list[str](), Known.of(model), set[int]()
    for name, module in model.named_modules():
        if any(not other or name.startswith(f"{other}.") for other in found):
            continue
        if factory_of(module) is None:
            near = joined(module, max(ranks, 2), lambda group, at=module: code.allows(group, at, smallest_bytes))
            together |= near.keys if near else set()
        elif id(module) in together or not is_small(module, smallest_bytes, ranks, code.held):
            found.append(name)
    return found


@contextmanager
def enabled(
    axis: Axis, *, select: Select | None = None, sequence: bool = False, smallest_bytes: int = SMALLEST_BYTES
) -> Iterator[None]:
    """Split what is made within this context, at its end, as `apply` does. Every rank of the axis must enter it.

    Weights are drawn whole before, so they are those of one process with the same seed, which must be the same on all
    ranks of the axis. To never hold a whole model, make it on the device `meta` and load its weights afterwards.

    Args:
        axis: `mesh["model"]`, say.
        select: As in `apply`; names begin at the outermost module that was made.
        sequence: As in `apply`.
        smallest_bytes: As in `apply`.

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(model=-1)
        >>> with enabled(mesh["model"]):
        ...     model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    """
    check_axis(axis, by="tensor_parallel.enabled")
    made: dict[int, nn.Module] = {}
    owned: set[int] = set()

    def add(owner: nn.Module, _name: str, part: nn.Module | nn.Parameter | None) -> None:
        made[id(owner)] = owner
        if isinstance(part, nn.Module):
            made[id(part)] = part
            owned.add(id(part))

    handles = [
        hooks.register_module_module_registration_hook(add),
        hooks.register_module_parameter_registration_hook(add),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    walk = Walk(axis, moves_of(select), sequence, smallest_bytes)
    if axis.size > 1:
        _split([module for key, module in made.items() if key not in owned], walk)


def _split(models: Sequence[nn.Module], walk: Walk) -> None:
    for model in models:
        walk.start(model)
    walk.finish(models)
    for module in (module for model in models for module in model.modules()):
        has_scores = not walk.split_scores.isdisjoint(module.children())
        if has_scores and getattr(attribute_of(module, "loss_function"), "__name__", "") == "ForCausalLMLoss":
            setattr(module, "loss_function", CausalLoss(walk.axis))  # noqa: B010 - a property of transformers' class
