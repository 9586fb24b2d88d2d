"""`wrap`: a plain `nn.Module` within a named model; it runs on each rank's part, along dimensions that are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call

from tulle.errors import ModelError
from tulle.named.dims import Dim, as_dims, spelled
from tulle.named.gradients import Leaf
from tulle.named.module import Module
from tulle.named.placed import aligned, label_of, shared_scope
from tulle.named.scope import Scope
from tulle.named.tensor import Tensor


class Wrapped(Module):
    """A plain module that treats each entry of all other dimensions by itself, as a convolution does a batch."""

    def __init__(self, module: nn.Module, inputs: Dim | Sequence[Dim], outputs: Dim | Sequence[Dim]) -> None:
        super().__init__()
        self.module = module
        self.inputs, self.outputs = as_dims(inputs), as_dims(outputs)
        self._leaves: dict[str, Leaf] = {}
        self._scope: Scope | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the module on `(others, *inputs)`, which gives `(others, *outputs)`.

        Raises:
            PlanError: If the layout splits a dimension that the module sees.
        """
        scope = shared_scope([x], "wrap")
        scope.check_whole((*self.inputs, *self.outputs), f"the plain module {type(self.module).__name__} works along")
        for dim in self.inputs:
            x.place(dim, "wrap")
        others = tuple(dim for dim in x.dims if dim not in self.inputs)
        axes = tuple(sorted(scope.axes(others, "wrap of")))
        local = aligned(x.local, x.dims, (*others, *self.inputs))
        parameters = {name: leaf.entered(axes, label_of("wrap", others)) for name, leaf in self._held(scope).items()}
        result = functional_call(self.module, parameters, (local,))
        dims = (*others, *self.outputs)
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or tuple(result.shape) != scope.local_shape(dims):
            gave = f"a tensor of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
            raise ModelError(
                f"the plain module {type(self.module).__name__} gave {gave}, expected "
                f"{scope.local_shape(dims)} for {spelled(dims)}: tell tn.wrap what dimensions it gives"
            )
        return Tensor(result, dims)

    def _held(self, scope: Scope) -> dict[str, Leaf]:
        if scope is not self._scope:
            for leaf in self._leaves.values():
                leaf.close()
            self._leaves = {name: Leaf(one, scope.gradients) for name, one in self.module.named_parameters()}
            self._scope = scope
        return self._leaves


def wrap(module: nn.Module, inputs: Dim | Sequence[Dim], outputs: Dim | Sequence[Dim]) -> Wrapped:
    """A plain module as part of a named model; its parameters are whole on every rank, and must begin equal there.

    Args:
        module: Takes one tensor whose last dimensions are `inputs`, gives one whose last are `outputs`.
        inputs: Dimensions that it sees; the layout leaves them whole.
        outputs: Dimensions that it gives in their place.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d, e = tn.dims(batch=2, d=3, e=4)
        >>> layer = wrap(torch.nn.Linear(3, 4), d, e)
        >>> layer(tn.from_torch(torch.ones(2, 3), (batch, d)))
        Tensor(batch=2, e=4; float32)
    """
    return Wrapped(module, inputs, outputs)
