"""`wrap`: a plain `nn.Module` within a named model; it runs on each rank's part, along dimensions that are whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, as_dims, spelled
from tulle.named.gradients import PlainLeaf
from tulle.named.module import Module
from tulle.named.placed import aligned, label_of, shared_scope
from tulle.named.randomness import key_of, next_key, torch_drawn_by
from tulle.named.scope import Scope
from tulle.named.tensor import Tensor


class Wrapped(Module):
    """A plain module that treats each entry of all other dimensions by itself, as a convolution does a batch."""

    def __init__(self, module: nn.Module, inputs: Dim | Sequence[Dim], outputs: Dim | Sequence[Dim]) -> None:
        super().__init__()
        self.module = module
        self.inputs, self.outputs = as_dims(inputs), as_dims(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module on `(others, *inputs)`, which gives `(others, *outputs)`.

        Raises:
            PlanError: If the layout splits a dimension that the module sees, or one over which it takes statistics.
        """
        scope = shared_scope([x], "wrap")
        scope.check_whole((*self.inputs, *self.outputs), f"the plain module {type(self.module).__name__} works along")
        for dim in self.inputs:
            x.place(dim, "wrap")
        others = tuple(dim for dim in x.dims if dim not in self.inputs)
        axes = tuple(sorted(scope.axes(others, "wrap of")))
        self._check_statistics(scope, others)
        local = aligned(x.local, x.dims, (*others, *self.inputs))
        label = label_of("wrap", others)
        parameters = {
            name: PlainLeaf.of(one, scope.gradients).entered(axes, label)
            for name, one in self.module.named_parameters()
        }
        with self._draws(scope, others, local.device):
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

    def _draws(self, scope: Scope, others: Dims, device: torch.device) -> AbstractContextManager[None]:
        """In training, draws by the part: ranks that hold the same one drop the same, and so does a recomputation."""
        if not self.module.training:
            return nullcontext()
        return torch_drawn_by(key_of(next_key(), *map(scope.place_along, others)), device)

    def _check_statistics(self, scope: Scope, others: Dims) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                what = f"the plain module {name or type(self.module).__name__} takes statistics over"
                scope.check_whole(others, what)


def wrap(module: nn.Module, inputs: Dim | Sequence[Dim], outputs: Dim | Sequence[Dim]) -> Wrapped:
    """A plain module as part of a named model; its parameters are whole on every rank, and must begin equal there.

    In training, what the module draws (dropout) follows `tn.manual_seed`, anew for each part of the other dimensions:
    it is alike on ranks that hold the same part, and when it is computed again.

    Args:
        module: Takes one tensor whose last dimensions are `inputs`, gives one whose last are `outputs`.
        inputs: Dimensions that it sees; the layout leaves them whole.
        outputs: Dimensions that it gives in their place.

    Raises:
        PlanError: When it runs, if the layout splits a dimension that it sees, or over which a batch norm inside takes
            statistics.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d, e = tn.dims(batch=2, d=3, e=4)
        >>> layer = wrap(torch.nn.Linear(3, 4), d, e)
        >>> layer(tn.from_torch(torch.ones(2, 3), (batch, d)))
        Tensor(batch=2, e=4; float32)
    """
    return Wrapped(module, inputs, outputs)
