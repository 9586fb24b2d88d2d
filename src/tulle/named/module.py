"""`Module` and `param`: models whose parameters have named dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, Layout, as_dims, check_once, spelled, volume
from tulle.named.gradients import Leaf
from tulle.named.placed import Axes, Local
from tulle.named.randomness import as_seed, key_of, normal
from tulle.named.scope import Scope, current
from tulle.named.tensor import Tensor


class _Declared(Scope):
    """Where parameters live that `Module.init` has not seen."""

    def __repr__(self) -> str:
        return "no layout yet"


_DECLARED = _Declared(None, Layout())
_REGISTERS = ("_parameters", "_buffers", "_modules")
"""Of an `nn.Module`, by name."""


class Parameter(Tensor):
    """A trained tensor with named dimensions: declared by `param`, allocated and drawn by `Module.init`."""

    __slots__ = ("_leaf", "name", "std")
    is_parameter: ClassVar[bool] = True
    mend: ClassVar[str] = (
        "call init(seed) of the model under the mesh and the layout in force; a parameter in a plain list is no "
        "part of the model: make it an attribute"
    )

    def __init__(self, dims: Dims, std: float | None, dtype: torch.dtype | None) -> None:
        whole = nn.Parameter(torch.empty([dim.size for dim in dims], dtype=dtype, device="meta"))
        super().__init__(whole, dims, (), _DECLARED)
        self.name = ""
        self.std = std
        self._leaf = Leaf(whole, _DECLARED.gradients)

    @property
    def parameter(self) -> nn.Parameter:
        """This rank's part, as optimizers see it."""
        return self._leaf.parameter

    @property
    def part(self) -> Local:
        """This rank's part, as an operation of the parameter's own dimensions uses it."""
        return self._leaf.entered((), self.name)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._leaf.parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """The gradient, laid out as the parameter is."""
        gradient = self._leaf.parameter.grad
        return None if gradient is None else Tensor(gradient, self.dims, (), self.scope)

    def detach(self) -> Tensor:
        """The same numbers, through which no gradient flows back."""
        return Tensor(self._leaf.parameter.detach(), self.dims, (), self.scope)

    def entered(self, axes: Axes, label: str) -> Local:
        """This rank's part as it enters an operation that further axes split; the gradient's sum is put off."""
        return self._leaf.entered(axes, label)

    def place_under(self, scope: Scope, parameter: nn.Parameter) -> Leaf:
        """Hold a part that is laid out for a scope; gives what was held before, for `put_back`."""
        if scope.local_shape(self.dims) != tuple(dim.size for dim in self.dims):
            parameter.clipped_with = "tulle.named.clip_grad_norm"  # pyright: ignore[reportAttributeAccessIssue]
        else:
            vars(parameter).pop("clipped_with", None)
        before, self._leaf = self._leaf, Leaf(parameter, scope.gradients)
        self.scope, self._part = scope, parameter
        return before

    def hold(self, parameter: nn.Parameter) -> None:
        """Hold another part, laid out as the one before."""
        self.place_under(self.scope, parameter).close()

    def begin(self, scope: Scope, values: Local) -> None:
        """Let the `nn.Parameter`, which others may hold already, have values that are laid out for a scope."""
        held = self.parameter
        if self.scope is _DECLARED:
            torch.utils.swap_tensors(nn.Parameter(values, requires_grad=held.requires_grad), held)
        else:
            held.data, held.grad = values, None
        self.place_under(scope, held).close()

    def put_back(self, scope: Scope, leaf: Leaf) -> None:
        """Hold again what was held before."""
        self.scope, self._leaf, self._part = scope, leaf, leaf.parameter

    def drawn(self, scope: Scope, key: int) -> Local:
        """This rank's part of the initial values, by global index."""
        shape = scope.local_shape(self.dims)
        if self.std is None:
            return torch.ones(shape, dtype=self.dtype, device=scope.device)
        if self.std == 0:
            return torch.zeros(shape, dtype=self.dtype, device=scope.device)
        return (normal(scope, self.dims, key, device=scope.device) * self.std).to(self.dtype)

    def __repr__(self) -> str:
        return super().__repr__().replace("Parameter(", f"Parameter {self.name}(".replace(" (", "("))


def param(
    *dims: Dim, std: float | None = None, inputs: Dim | Sequence[Dim] = (), dtype: torch.dtype | None = None
) -> Parameter:
    """Declare a parameter of a `Module`; `Module.init` allocates and draws it.

    Args:
        *dims: Its dimensions.
        std: Standard deviation of its normal initial values; default one over the square root of the `inputs`' size.
        inputs: The dimensions over which its use sums; default the first.
        dtype: Of the values; default torch's.

    Raises:
        ModelError: If a dimension comes twice.

    Example:
        >>> from tulle import named as tn
        >>> d_model, d_ff = tn.dims(d_model=4, d_ff=16)
        >>> tn.param(d_model, d_ff)
        Parameter(d_model=4, d_ff=16; float32)
    """
    check_once(as_dims(dims), "param")
    if std is None:
        std = volume(as_dims(inputs) or dims[:1]) ** -0.5
    return Parameter(dims, std, dtype)


def ones(*dims: Dim, dtype: torch.dtype | None = None) -> Parameter:
    """Declare a parameter that begins as ones, such as the gain of a norm. Arguments as for `param`.

    One that begins as zeros, such as a bias, is `param(..., std=0)`: `zeros` makes numbers that are not trained.
    """
    check_once(as_dims(dims), "ones")
    return Parameter(dims, None, dtype)


class Module(nn.Module):
    """An `nn.Module` whose attributes may be named parameters; the two kinds nest in each other.

    Named parameters are declared first, whatever their size, and allocated by `init`. `parameters()`, `state_dict()`
    and torch's optimizers see this rank's parts. Several modules may hold one parameter.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> d_model, d_ff = tn.dims(d_model=4, d_ff=16)
        >>> class Inner(tn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = tn.param(d_model, d_ff)
        ...     def forward(self, x):
        ...         return tn.relu(x.dot(self.weight, d_model))
        >>> Inner().init(seed=0)(tn.from_torch(torch.ones(4), (d_model,)))
        Tensor(d_ff=16; float32)
    """

    def __new__(cls, *_arguments: object, **_keywords: object) -> Self:
        """Ready for attributes, also where a subclass' `__init__` leaves `super().__init__()` out."""
        module = super().__new__(cls)
        nn.Module.__init__(module)
        return module

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        before = [dict(vars(self)[register]) for register in _REGISTERS]
        super().__init__(*arguments, **keywords)  # begins with empty registers
        for register, held in zip(_REGISTERS, before, strict=True):
            vars(self)[register].update(held)

    def __setattr__(self, name: str, value: Any) -> None:
        named: dict[str, Parameter] = vars(self).setdefault("_named", {})
        if isinstance(value, Parameter):
            value.name = value.name or name
            vars(self).pop(name, None)
            self.register_parameter(name, value.parameter)
            named[name] = value
        elif name in named and isinstance(value, nn.Parameter) and value.shape == named[name].parameter.shape:
            named[name].hold(value)  # as `load_state_dict` with `assign` does
            show_parts(self)
        else:
            super().__setattr__(name, value)
            named.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        named: dict[str, Parameter] = vars(self).get("_named", {})
        if name not in named:
            return super().__getattr__(name)
        parameter, part = named[name], self._parameters.get(name)
        if part is parameter.parameter:
            return parameter
        # `torch.func.functional_call` has put another there.
        return None if part is None else Tensor(part, parameter.dims, (), parameter.scope)

    def __delattr__(self, name: str) -> None:
        vars(self).get("_named", {}).pop(name, None)
        super().__delattr__(name)

    @property
    def saved_with(self) -> str | None:
        """What makes whole tensors of its parameters, where a rank has parts of them; `tulle.save` does not."""
        scopes = [parameter.scope for parameter in vars(self).get("_named", {}).values()]
        return "tulle.named.save" if any(scope.wire_or_none is not None for scope in scopes) else None

    def init(self, seed: int = 0) -> Module:
        """Allocate all named parameters under the layout in force, and draw them by seed, name and global index.

        Every rank must call it, with the same seed. An optimizer may be made before the first time; after another,
        under another layout, its states do not fit, and it must be made anew. Plain modules inside are left as they
        are: they must be equal on all ranks.

        Raises:
            PlanError: If a parameter is not legal in the layout.
            ModelError: If the seed is no integer.
        """
        scope, seed = current(), as_seed(seed, "init")
        for name, parameter in named_parameters(self):
            parameter.name = name
            scope.axes(parameter.dims, f"parameter {name}")
        for name, parameter in named_parameters(self):
            parameter.begin(scope, parameter.drawn(scope, key_of(seed, name)))
        show_parts(self)
        return self


def show_parts(module: nn.Module) -> None:
    """Let `nn.Module`'s own registers hold the parts that the named parameters hold now."""
    for one in module.modules():
        for name, parameter in vars(one).get("_named", {}).items():
            one._parameters[name] = parameter.parameter


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """All named parameters of a module and of those inside it, each once, by the name of its first place.

    Raises:
        ModelError: If it is no module, but its parameters, say.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"a {type(module).__name__} was given, expected the model itself, which knows the dimensions of its "
            "parameters: leave .parameters() out"
        )
    seen: set[int] = set()
    for path, one in module.named_modules():
        for name, parameter in vars(one).get("_named", {}).items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def check_initialized(module: nn.Module) -> None:
    """Refuse a model whose parameters were not allocated under the layout in force.

    Raises:
        ModelError: Naming the first one.
    """
    for name, parameter in named_parameters(module):
        if parameter.scope is not current():
            raise ModelError(f"parameter {name} {spelled(parameter.dims)} lives elsewhere: {parameter.mend}")
