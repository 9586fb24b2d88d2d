"""`give`: a tensor gets values and stays the object that it is; `swappable`: a model whose tensors can get others.

`give_states` gives values to what an optimizer has made of parameters that had none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from tulle.errors import ModelError

BUILT = "_tulle_built"
"""The attribute by which a parameter or buffer that has no values yet knows how often it was written to when built."""


def give(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter or buffer on device meta its values, of any shape: it stays the object that it is.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.empty(2, device="meta"))
        >>> give(weight, torch.ones(3))
        >>> weight
        Parameter containing:
        tensor([1., 1., 1.], requires_grad=True)
    """
    made = torch.Tensor._make_subclass(type(tensor), values.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    vars(made).pop(BUILT, None)
    torch.utils.swap_tensors(tensor, made)


def give_states(optimizers: Sequence[Optimizer]) -> None:
    """Give the states of parameters that have values by now theirs: of torch's optimizers Adagrad alone has made some.

    Raises:
        ModelError: If another optimizer has, of which nobody knows what they were filled with.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = {} if parameter.is_meta else optimizer.state.get(parameter, {})
                for key in [key for key, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
                    if not isinstance(optimizer, Adagrad):
                        raise ModelError(
                            f"{type(optimizer).__name__} has made its state {key!r} of a parameter that was without "
                            "values, within tulle.deferred_init: make it after tulle.distribute, which takes a "
                            "torch.optim.SGD that never steps in its place"
                        )
                    first = group["initial_accumulator_value"] if key == "sum" else 0
                    first = complex(first, first) if state[key].is_complex() else first
                    state[key] = torch.full_like(state[key], first, device=parameter.device)


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """Have nothing refer to a model's tensors, which `swap_tensors` refuses.

    Recurrent modules keep weak references. What hooks make of parameters before each forward (`torch.nn.utils`'
    `weight_norm` and `prune`) is an attribute that keeps a graph; it is made anew at the next call.
    """
    for module in model.modules():
        vars(module).update(_without_graph(vars(module)) if module._forward_pre_hooks else {})
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def _without_graph(attributes: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in attributes.items() if isinstance(value, Tensor) and value.grad_fn}
