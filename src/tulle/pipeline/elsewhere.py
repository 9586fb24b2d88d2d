"""`Elsewhere`: a parameter or buffer that lives at another stage, outside of steps: its shape and dtype, and no values.

Programs ask a model's first parameter where tensors are to be made (`model.device`, `ids.to(next(model.parameters())
.device)`, `next(model.parameters()).new_zeros(...)`). Within steps a placeholder answers; outside of them it is this.
Random numbers that are drawn for it there are drawn in vain here: a rank that left them out would draw others from then
on, of batches, say, than the rank that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from tulle.deferred.draws import can_draw_in_chunks, draw_in_chunks
from tulle.errors import ModelError
from tulle.parts import (
    COUNTS,
    DRAWS,
    LEAVES_TORCH,
    LIKE,
    OF_NO_VALUES,
    PLAIN,
    SHAPES,
    asks_of_whole,
    name_of,
    shape_told,
)
from tulle.pipeline.placeholder import running
from tulle.pipeline.structure import LEAF_KINDS

_DEVICE: Any = vars(torch._C.TensorBase)["device"]
_IS_META: Any = vars(torch._C.TensorBase)["is_meta"]
_BY_SHAPE = LIKE | {"view_as", "expand_as", "reshape_as", "__set__"}
"""Names of what asks a tensor of another for its shape, dtype or device alone."""
_READS = {"item", "equal", "allclose", *LEAVES_TORCH} | {
    f"__{name}__" for name in ("bool", "float", "int", "index", "complex", "format")
}
"""Names of what wants values."""
_DRAWS = DRAWS - {"view_as"}
_DRAWN_BYTES = 64 << 20
"""Of numbers that are drawn in vain, this many are there at once, if their kind can be drawn so."""
_COPIES = {"copy_", "_foreach_copy_"}
"""Names of what writes on `meta`, too, and would do so in vain."""
_alone: dict[int, ref[Tensor]] = {}
"""What this rank alone has of models, by its memory."""
_MAKES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _is_away(tensor: Tensor) -> bool:
    """Whether it has no values, and no step runs, whose placeholder would answer."""
    return running.get() is None and _IS_META.__get__(tensor)


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
        if (func in SHAPES or func in COUNTS) and asks_of_whole():
            return func(torch.empty(shape_told(args[0]), device="meta"), *args[1:])
        is_alone = len(args) == 1 and not kwargs and isinstance(args[0], _AtHome)
        if is_alone and func in OF_NO_VALUES:  # first, as it is asked several times a step
            with torch._C.DisableTorchFunctionSubclass():
                told = func(*args)
            if not isinstance(told, Tensor):
                return told
        return _given_plain(func, args, kwargs or {}, leaves=args if is_alone else tree_leaves((args, kwargs)))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of a tensor of its device: what moving averages bring to another is there, without values, too."""
        device, dtype, *_ = cast("Any", torch._C)._nn._parse_to(*args, **kwargs) if _is_away(self) else (None, None)
        if device is None:
            return super().to(*args, **kwargs)
        if device.type == self._home.type:
            return self if dtype in (None, self.dtype) else super().to(dtype)
        return _at_home(ElsewhereData, super().to(dtype or self.dtype, copy=True), device)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same: parameters that are put by for the time of an evaluation lie there."""
        return self.to("cpu") if _is_away(self) else super().cpu(*args, **kwargs)


def _given_plain(
    func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], leaves: Sequence[Any]
) -> Any:
    """What a function gives of what lives elsewhere as the plain tensor on `meta` that it is.

    Args:
        func: The function.
        args: Its arguments, and
        keywords: those by name.
        leaves: All that is in them.
    """
    kinds = [(leaf, type(leaf)) for leaf in leaves if isinstance(leaf, _AtHome)]
    name = name_of(func)
    if name in _COPIES and kinds:
        refuse_alone(name, kinds[0][0], leaves)
    if name in _DRAWS and all(_is_away(tensor) for tensor, _ in kinds):
        _draw_in_vain(func, args, keywords)
    for tensor, kind in kinds:
        object.__setattr__(tensor, "__class__", nn.Parameter if issubclass(kind, nn.Parameter) else Tensor)
    try:
        result = func(*args, **keywords)
    except (RuntimeError, TypeError) as error:
        if kinds and "meta" in str(error) and _has_values(leaves):
            raise _mixed(name, kinds[0][0]) from error
        wants_values = name in _READS or isinstance(error, NotImplementedError)
        if kinds and wants_values and _is_away(kinds[0][0]):
            raise _read(name, kinds[0][0]) from error
        raise
    finally:
        for tensor, kind in kinds:
            object.__setattr__(tensor, "__class__", kind)
    if not kinds or name in PLAIN:
        return result
    is_said_to_be_here = isinstance(result, Tensor) and not _IS_META.__get__(result)
    if is_said_to_be_here and name not in _BY_SHAPE and _has_values(leaves):
        raise _mixed(name, kinds[0][0])  # a CPU has computed with what lay in memory
    return _computed(result, kinds[0][0]._home)


def _is_on_meta(tensor: _AtHome) -> bool:
    """As of any tensor. Functions of `torch.nn.init` that ask it draw nothing where it is so: here in vain."""
    asks = sys._getframe(1)
    if asks.f_code.co_filename == nn.init.__file__ and _is_away(tensor):
        function, names = asks.f_code, asks.f_code.co_varnames[: asks.f_code.co_argcount]
        _draw_in_vain(getattr(nn.init, function.co_name), (), {name: asks.f_locals[name] for name in names})
    return _IS_META.__get__(tensor)


_PROPERTIES = {"device": property(_device_of), "is_meta": property(_is_on_meta)}
for _name, _answer in {**_PROPERTIES, **{name: _made_at_home(name) for name in _MAKES}}.items():
    setattr(_AtHome, _name, _answer)


class ElsewhereData(_AtHome):
    """A buffer, and what is computed of one or of a parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As of any tensor."""
        return memo.setdefault(id(self), _at_home(ElsewhereData, self.clone(), self._home))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor without memory."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class Elsewhere(_AtHome, nn.Parameter):
    """A parameter that lives at another stage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """As of any parameter."""
        return cast("nn.Parameter", elsewhere(super().__deepcopy__(memo), self._home))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain parameter without memory."""
        return nn.Parameter(self.as_subclass(Tensor).detach(), self.requires_grad).__reduce_ex__(protocol)


LEAF_KINDS |= {Elsewhere, ElsewhereData}


@cache
def refuse_in_place_of_own() -> None:
    """From now on raise where a parameter of another stage is put in the place of one that this rank has.

    Whether a module reads such is looked at in its first call with arguments of a shape. In a later one torch would
    multiply what is on `meta`, on a CPU, as if there were numbers.
    """
    register_module_parameter_registration_hook(_check_put)


def _check_put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    before = module._parameters.get(name)
    if isinstance(parameter, Elsewhere) and _is_away(parameter) and before is not None and not before.is_meta:
        raise ModelError(
            f"{name!r} of a {type(module).__name__}, of shape {list(before.shape)}, was set to a parameter that lives "
            "at another stage, which this rank's module cannot read: tie parameters before the model is placed, or "
            "write the values into the one that is there"
        )


def elsewhere(tensor: Tensor, home: torch.device) -> Tensor:
    """Have a plain parameter or buffer on device `meta` be one that lives elsewhere. It is given back.

    Args:
        tensor: That other ranks have.
        home: Where this rank computes.

    Example:
        >>> weight = elsewhere(nn.Parameter(torch.empty(2, device="meta")), torch.device("cpu"))
        >>> weight.is_meta, weight.device, weight.new_zeros(1)
        (True, device(type='cpu'), tensor([0.]))
    """
    return _at_home(Elsewhere if isinstance(tensor, nn.Parameter) else ElsewhereData, tensor, home)


def note_alone(tensor: Tensor) -> None:
    """Note that this rank alone has a parameter or buffer, so that a copy to one that lives elsewhere is refused."""
    memory = tensor.untyped_storage()._cdata
    _alone[memory] = ref(tensor, lambda gone: _alone.pop(memory) if _alone.get(memory) is gone else None)


def refuse_alone(name: str, away: Tensor, given: Iterable[object]) -> None:
    """Refuse to write what this rank alone has into what lives elsewhere, as the rank does that has the latter.

    Args:
        name: Of what writes.
        away: What lives elsewhere.
        given: What is written, among others.
    """
    if _is_away(away) and any(map(_is_alone, given)):
        raise _mixed(name, away)


def _is_alone(given: object) -> bool:
    if type(given) not in (Tensor, nn.Parameter) or given.layout != torch.strided:  # type: ignore[attr-defined]
        return False
    found = _alone.get(given.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return found is not None and (one := found()) is not None and one.data_ptr() == given.data_ptr()  # type: ignore[attr-defined]


def _at_home(kind: type[_AtHome], tensor: Tensor, home: torch.device) -> Tensor:
    object.__setattr__(tensor, "__class__", kind)
    cast("_AtHome", tensor)._home = home
    return tensor


def _has_values(leaves: Iterable[object]) -> bool:
    """Whether a tensor among arguments is here, and more than a number."""
    return any(isinstance(one, Tensor) and one.dim() and not _IS_META.__get__(one) for one in leaves)


def _mixed(name: str, away: Tensor) -> ModelError:
    return ModelError(
        f"{name} was given a parameter or buffer of shape {list(away.shape)} that lives at another stage, and "
        "has no values here, together with a tensor that has: use it within tulle.step, between modules, or in a "
        "module of its own stage; load another module from tulle.full_state_dict(module, everywhere=True); tie "
        "parameters, and put modules into others, before the model is placed"
    )


def _read(name: str, away: Tensor) -> ModelError:
    return ModelError(
        f"{name} reads a parameter or buffer of shape {list(away.shape)}, or what is computed of one, that lives at "
        "another stage, outside of tulle.step, where only the rank of that stage has values: ask within a step, in "
        "evaluation too, or take tulle.full_state_dict(model), on every rank"
    )


def _computed(result: Any, home: torch.device) -> Any:
    if type(result) in (tuple, list):  # torch's own walk leaves cycles behind
        return type(result)(_computed(one, home) for one in result)
    return _at_home(ElsewhereData, result, home) if type(result) is Tensor and result.is_meta else result


def _draw_in_vain(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Have generators stand where they do at the stage that has what numbers are drawn for."""
    drawn, name = args[0] if args else None, name_of(func)
    if isinstance(drawn, _AtHome) and not kwargs and _is_drawn_in_chunks(drawn, name):
        for _ in draw_in_chunks(cast("Any", name), drawn.shape, drawn.dtype, args[1:], chunk_bytes=_DRAWN_BYTES):
            pass
        return
    with torch.no_grad():
        args, kwargs = tree_map_only(_AtHome, _stand_in, (args, kwargs))
        func(*args, **kwargs)


def _is_drawn_in_chunks(tensor: Tensor, name: str) -> bool:
    is_many = tensor.nbytes > _DRAWN_BYTES and tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_many and can_draw_in_chunks(name, tensor.dtype, tensor.numel())


def _stand_in(tensor: _AtHome) -> Tensor:
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return zeros.zero_()  # what stands for a probability must be one
