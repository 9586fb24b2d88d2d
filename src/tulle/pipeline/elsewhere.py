"""`Elsewhere`: a parameter that lives at another stage, outside of steps: its shape and dtype, and no values.

Programs ask a model's first parameter where tensors are to be made (`model.device`, `ids.to(next(model.parameters())
.device)`, `next(model.parameters()).new_zeros(...)`). Within steps a placeholder answers; outside of them it is this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from tulle.errors import ModelError
from tulle.pipeline.placeholder import running
from tulle.pipeline.structure import LEAF_KINDS

_DEVICE: Any = vars(torch._C.TensorBase)["device"]
_DATA: Any = vars(torch._C.TensorBase)["data"]
_MAKES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _is_away(tensor: Tensor) -> bool:
    """Whether it has no values, and no step runs, whose placeholder would answer."""
    return running.get() is None and tensor.is_meta


def _device_of(tensor: _AtHome) -> torch.device:
    return tensor._home if _is_away(tensor) else _DEVICE.__get__(tensor)


def _made_at_home(name: str) -> Callable[..., Tensor]:
    of_torch = getattr(Tensor, name)

    def make(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        like = torch.empty(0, dtype=self.dtype, device=self.device) if _is_away(self) else self
        return of_torch(like, *args, **kwargs)

    return make


class _AtHome(Tensor):
    """A tensor on device `meta` that tells where its rank computes, and makes new tensors there."""

    _home: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch computes with it stays on `meta`: of some operations it asks the device itself where to make them.

        They would come without values, but with memory. So they are given it as what it is, a plain tensor.
        """
        is_alone = len(args) == 1 and not kwargs and isinstance(args[0], _AtHome)
        leaves = args if is_alone else tree_leaves((args, kwargs))
        kinds = [(leaf, type(leaf)) for leaf in leaves if isinstance(leaf, _AtHome)]
        for tensor, kind in kinds:
            object.__setattr__(tensor, "__class__", nn.Parameter if issubclass(kind, nn.Parameter) else Tensor)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for tensor, kind in kinds:
                object.__setattr__(tensor, "__class__", kind)

    def detach(self) -> Tensor:
        """As of any tensor."""
        detached = super().detach()
        return _at_home(ElsewhereData, detached, self._home) if _is_away(self) else detached

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of a tensor of its device: what torch's moving averages bring there is there."""
        if _is_away(self):
            device, dtype, *_ = cast("Any", torch._C)._nn._parse_to(*args, **kwargs)
            if device is not None and device.type == self._home.type:
                return self if dtype in (None, self.dtype) else super().to(dtype)
        return super().to(*args, **kwargs)


for _name, _answer in {"device": property(_device_of), **{name: _made_at_home(name) for name in _MAKES}}.items():
    setattr(_AtHome, _name, _answer)


class ElsewhereData(_AtHome):
    """`parameter.data` of one, and what `state_dict` gives of it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As of any tensor."""
        return memo.setdefault(id(self), _at_home(ElsewhereData, self.clone(), self._home))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor without memory."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _data_of(parameter: Elsewhere) -> Tensor:
    data = _DATA.__get__(parameter)
    return _at_home(ElsewhereData, data, parameter._home) if _is_away(parameter) else data


class Elsewhere(_AtHome, nn.Parameter):
    """A parameter that lives at another stage."""

    data = cast("Any", property(_data_of, _DATA.__set__))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """As of any parameter."""
        return cast("nn.Parameter", elsewhere(super().__deepcopy__(memo), self._home))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain parameter without memory."""
        return nn.Parameter(Tensor.detach(self), self.requires_grad).__reduce_ex__(protocol)


LEAF_KINDS.add(Elsewhere)


def refuse_in_place_of_own() -> None:
    """From now on raise where a parameter of another stage is put in the place of one that this rank has.

    Whether a module reads such is looked at in its first call with arguments of a shape. In a later one torch would
    multiply what is on `meta`, on a CPU, as if there were numbers.
    """
    global _is_refusing
    if not _is_refusing:
        register_module_parameter_registration_hook(_check_put)
        _is_refusing = True


_is_refusing = False


def _check_put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    before = module._parameters.get(name)
    if isinstance(parameter, Elsewhere) and _is_away(parameter) and before is not None and not before.is_meta:
        raise ModelError(
            f"{name!r} of a {type(module).__name__}, of shape {list(before.shape)}, was set to a parameter that lives "
            "at another stage, which this rank's module cannot read: tie parameters before the model is placed, or "
            "write the values into the one that is there"
        )


def elsewhere(parameter: Tensor, home: torch.device) -> Tensor:
    """Have a plain parameter on device `meta` be one that lives elsewhere. It is given back.

    Args:
        parameter: That other ranks have.
        home: Where this rank computes.

    Example:
        >>> weight = elsewhere(nn.Parameter(torch.empty(2, device="meta")), torch.device("cpu"))
        >>> weight.is_meta, weight.device, weight.new_zeros(1)
        (True, device(type='cpu'), tensor([0.]))
    """
    return _at_home(Elsewhere, parameter, home)


def _at_home(kind: type[_AtHome], tensor: Tensor, home: torch.device) -> Tensor:
    object.__setattr__(tensor, "__class__", kind)
    cast("_AtHome", tensor)._home = home
    return tensor
