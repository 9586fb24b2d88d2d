"""`Part`: a parameter that holds a part of what it stands for, and is not to be taken for the whole.

A rank holds some rows of a split table, in an order of their own, or some columns, or its share of a weight that is
shared out, or of a layer that is split. What treats every number by itself (an optimizer, weight decay, a penalty, a
moving average, a mask) does to the part what it would do to the whole. A product with it, a row read by its number, or
numbers drawn anew would be others than one process has, without a word:

    hidden @ words.weight.T,  F.linear(hidden, words.weight),  words.weight[3],  nn.init.normal_(words.weight)

These raise, and so does what mixes numbers along the dimension that is cut: of a table of which a rank has whole rows
`F.normalize(words.weight, dim=1)` is right, and with `dim=0` it is not. Of `parameter.data` only this, rows read or
written by number, numbers drawn and what leaves torch (`numpy()`, `tolist()`) are refused, of `parameter.detach()`
nothing: it is for who knows that only a part lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.errors import ModelError

T = TypeVar("T", bound=Tensor)

_INDEXED = {"__getitem__", "__setitem__"}
_BY_NUMBER = _INDEXED | {
    *("unbind", "flip", "roll", "tril", "tril_", "triu", "triu_", "eye", "fill_diagonal_", "masked_scatter_"),
    *("index_add_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_", "scatter_add_", "scatter_reduce_"),
    *("fliplr", "flipud", "rot90", "take_along_dim", "gather", "take", "scatter", "scatter_add", "scatter_reduce"),
    *("channel_shuffle", "multinomial", "argwhere"),
}
"""Names of what depends on where a number lies."""
_LEAVES = {"numpy", "tolist", "__array__", "__dlpack__"}
"""Names of what takes the numbers out of torch, where nothing knows any more that they are a part."""
_DRAWN = {"uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "log_normal_", "random_", "view_as"}
"""Names of what writes random numbers, methods of tensors or functions of `torch.nn.init`; by the last of them
`orthogonal_` does, and nobody else needs it of a parameter."""
_PRODUCTS = {
    *("T", "mT", "H", "mH", "t", "transpose", "swapaxes", "swapdims", "permute", "adjoint"),
    *("__matmul__", "__rmatmul__", "matmul", "mm", "addmm", "bmm", "einsum", "tensordot", "inner", "outer"),
    *("cdist", "linear", "bilinear", "transpose_", "t_", "swapaxes_", "swapdims_", "transpose_copy", "movedim"),
    *("moveaxis", "baddbmm", "addbmm", "chain_matmul", "cov", "corrcoef", "scaled_dot_product_attention"),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "qr", "pinverse", "inverse", "matrix_exp", "matrix_power"),
    *("linalg_cholesky", "linalg_cholesky_ex", "linalg_inv", "linalg_inv_ex", "linalg_pinv", "linalg_qr", "linalg_lu"),
    *("linalg_matrix_exp", "linalg_matrix_power", "linalg_multi_dot", "linalg_solve", "linalg_solve_triangular"),
}
"""Names of what would give numbers of a shape that fits where a part is square."""
_MIXES = {
    *("group_norm", "instance_norm", "batch_norm", "local_response_norm", "cross", "linalg_cross", "diff", "gradient"),
    *("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d", "unique", "unique_consecutive", "searchsorted"),
    *("fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_hfft2", "fft_hfftn", "fft_irfft2", "fft_irfftn"),
}
"""Names of what may give a part's shape, and mixes numbers along several dimensions."""
_ALONG: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax"), (1, None)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumsum_", "cumprod_"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), (2, -1)),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
    "msort": (9, 0),
    "normalize": (2, 1),
    "gumbel_softmax": (4, -1),
}
"""By name of what mixes numbers along a dimension and gives a part's shape: which argument says the dimension, and what
that is if none does; None for all."""
_REDUCED: Mapping[str, int] = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "max", "min", "amax", "amin", "aminmax"), 1),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean", "logsumexp", "median", "nanmedian"), 1),
    **dict.fromkeys(("mode", "all", "any", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm", "quantile", "nanquantile", "kthvalue"), 2),
}
"""By name of what makes one number of those along a dimension: which argument says it, if it is not to be all."""
_PLACES = {"argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "kthvalue"}
"""Names of those that also give where it lies."""
_SUMS = {"sum", "nansum", "dot", "vdot"}
"""Names of what gives one number whose gradient is right for each part; its value is this rank's share."""
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
"""Names of what does so with `reduction="sum"`."""
_NORMS = {"norm", "linalg_vector_norm"}
"""Names of what does so with the order 1."""
_AS_THEY_ARE = ("_foreach_", "_fused_", "_amp_", "new_")
"""How the names of functions begin that treat every number of many tensors by itself, or ask for dtype and device."""
OF_NO_VALUES = frozenset(
    accessor
    for name in ("grad", "requires_grad", "is_leaf", "_version", "dtype", "device")
    for accessor in (getattr(vars(torch._C.TensorBase)[name], kind) for kind in ("__get__", "__set__", "__delete__"))
)
"""What may be asked of any tensor as it is: all that `zero_grad` asks, and that who fetches rows asks."""
_AS_IT_IS = OF_NO_VALUES | {Tensor.detach}
"""What may be asked of a part as it is."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
_WHOLE = "_tulle_part_of"
"""The attribute by which a part knows what it is a part of."""


class Whole(Protocol):
    """What a parameter holds a part of."""

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        ...

    def refusal(self, taker: str) -> str:
        """What an error says of a function that took the part for all of it, from the function's name on."""
        ...

    def refusal_of_gradient(self) -> str | None:
        """What an error says of `torch.autograd.grad` for it; None if that gives the part's."""
        ...


class _Part(Tensor):
    """What takes part in functions of torch as a part."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let pass what treats every number by itself; and what backward does with a part that forward was let have.

        Raises:
            ModelError: Naming the parameter, what it was given to, and the mend.
        """
        keywords = kwargs or {}
        if func in _AS_IT_IS or torch._C._current_graph_task_id() != -1:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if not _KNOWN.issuperset(types):
            return NotImplemented  # what is still under way comes first
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.backward or name.startswith(_AS_THEY_ARE):
                return func(*args, **keywords)
            given = [*_tensors(args), *_tensors(keywords.values())]
            part = next(one for one in given if isinstance(one, _Part))
            if func is torch.autograd.grad:
                _check_gradients(given)
                return func(*args, **keywords)
            part._check_given(name, given, args, keywords)
            result = func(*args, **keywords)
            if not isinstance(result, Tensor | tuple | list):
                return result
            return part._checked(name, result, adds_up=_adds_up(name, args, keywords))

    def _check_given(
        self, name: str, given: Sequence[Tensor], args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        """Refuse what is not to see a part, alone or together with other tensors."""
        is_by_number = name in _BY_NUMBER and not (name in _INDEXED and _is_of_all(args[1], self))
        is_taken = is_by_number or name in _DRAWN or name in _LEAVES
        is_mixed = is_taken or mixes(name, self, getattr(self, _WHOLE).dim, args, keywords)
        if is_mixed and given[0] is self:
            _refuse(self, name)

    def _checked(self, name: str, result: Any, *, adds_up: bool) -> Any:
        """What a function gave, if nobody need look at it; `adds_up` if one number of it is right for each part."""
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _Guarded(_Part):
    """What must not meet tensors of other shapes, nor become one."""

    def _check_given(
        self, name: str, given: Sequence[Tensor], args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        super()._check_given(name, given, args, keywords)
        if name in _PRODUCTS or not all(_fits(one, self) or _is_number(one) for one in given):
            _refuse(self, name)

    def _checked(self, name: str, result: Any, *, adds_up: bool) -> Any:
        if not isinstance(result, Tensor):
            for one in result:
                if isinstance(one, Tensor):
                    self._checked(name, one, adds_up=adds_up)
            return result
        if not _fits(result, self):
            _refuse(self, name)
        if name == "data" or (name == "cpu" and result is not self and not result.requires_grad):
            return _become(PartData, result, self)  # an object of its own, unlike what an operation in place gives
        if result.requires_grad and result.grad_fn is not None:
            if result.dim():
                return _become(PartValues, result, self)
            if not adds_up:  # to print it does no harm
                result.register_hook(lambda _: _refuse(self, name))
        return result


def _gradient_of(part: Tensor) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return _GRADIENT.__get__(part)


def _give_gradient(part: Tensor, gradient: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _GRADIENT.__set__(part, gradient)


class Part(_Guarded, nn.Parameter):
    """A parameter that holds a part of what it stands for."""

    # Each step asks for it several times; by way of `__torch_function__` that takes four times as long.
    grad = cast("Any", property(_gradient_of, _give_gradient, partial(_give_gradient, gradient=None)))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter of the same numbers."""
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of a plain parameter."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class PartValues(_Guarded):
    """What was computed from a part, number by number, and has a gradient."""


class PartData(_Part):
    """`parameter.data` of a part, or a copy of it on the CPU."""

    def _checked(self, name: str, result: Any, *, adds_up: bool) -> Any:
        return _become(PartData, result, self) if name == "cpu" else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor of the same numbers."""
        return memo.setdefault(id(self), self.clone())


_PLAIN = {Part: nn.Parameter, PartValues: Tensor}
"""By class of what may be lent to code that knows parts, what it is then."""
_KNOWN = {Part, PartValues, PartData, Tensor, nn.Parameter}


def meets_parts(kind: type[T]) -> type[T]:
    """Have parts take a class of tensors for plain ones where both are given to a function."""
    _KNOWN.add(kind)
    return kind


def guard(parameter: nn.Parameter, whole: Whole) -> None:
    """Guard a plain parameter that holds a part; it stays the object that it is.

    Example:
        >>> class Halves:
        ...     dim = 0
        ...     def refusal(self, taker): return f"{taker} was given half of it"
        ...     def refusal_of_gradient(self): return None
        >>> weight = nn.Parameter(torch.ones(2, 4))
        >>> guard(weight, Halves())
        >>> (2 * weight).sum().backward()
        >>> torch.ones(1, 4) @ weight.T
        Traceback (most recent call last):
            ...
        tulle.errors.ModelError: T was given half of it
    """
    setattr(parameter, _WHOLE, whole)
    _guard_again([parameter])


def load_part(
    part: Tensor,
    key: str,
    state: dict[str, Any],
    errors: list[str],
    *,
    shape: Sequence[int],
    take: Callable[[Tensor], Tensor],
) -> None:
    """Have a state that is to be loaded hold this rank's part, where it has the whole, as that of a plain model does.

    Args:
        part: What the parameter holds.
        key: Of the parameter in the state.
        state: As `load_state_dict` gives it to its hooks.
        errors: What it will raise; a tensor that is neither is added, by the shape of the whole.
        shape: Of the whole.
        take: This rank's part of a whole.
    """
    value = state.get(key)
    if not isinstance(value, Tensor):
        return
    if tuple(value.shape) == tuple(shape):
        state[key] = take(value)
    elif value.shape != part.shape:
        errors.append(
            f"size mismatch for {key}: the state has a tensor of shape {list(value.shape)}, expected {list(shape)}, "
            "the whole, or this rank's part of it"
        )
        state[key] = part.detach()  # or torch would say the same by the part's shape


def step_plainly(optimizer: Optimizer) -> None:
    """Have parts be plain parameters while an optimizer steps, as torch has fused kernels for these alone."""
    parts = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Part)]
    if parts:
        optimizer.register_step_pre_hook(partial(_unguard, parts))
        optimizer.register_step_post_hook(partial(_guard_again, parts))


def lift(tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, type[Tensor]]]:
    """Have those that are guarded be plain, for code that knows that they are parts; give them, for `lower`."""
    lifted = [(one, type(one)) for one in tensors if one is not None and type(one) in _PLAIN]
    for part, kind in lifted:
        object.__setattr__(part, "__class__", _PLAIN[kind])
    return lifted


def lower(lifted: Iterable[tuple[Tensor, type[Tensor]]]) -> None:
    """Guard again what `lift` gave."""
    for part, kind in lifted:
        if type(part) is _PLAIN[kind]:
            object.__setattr__(part, "__class__", kind)


def _unguard(parts: Sequence[nn.Parameter], _: Optimizer, arguments: tuple[object, ...], keywords: object) -> None:
    if len(arguments) == 1 and not keywords:  # else a closure may call the model
        lift(parts)


def _guard_again(parts: Sequence[nn.Parameter], *_: object) -> None:
    for part in parts:
        if type(part) is nn.Parameter:
            object.__setattr__(part, "__class__", Part)


def _become(kind: type[_Part], result: Tensor, part: Tensor) -> Tensor:
    object.__setattr__(result, "__class__", kind)
    setattr(result, _WHOLE, getattr(part, _WHOLE))
    return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _fits(tensor: Tensor, part: Tensor) -> bool:
    return not tensor.dim() or tensor.shape == part.shape


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number for all, whatever its dimensions; not a place, nor what became of a part."""
    return tensor.numel() == 1 and tensor.is_floating_point() and not isinstance(tensor, _Part)


def _is_of_all(index: Any, part: Tensor) -> bool:
    """Whether an index takes numbers wherever they lie: all of them, or those under a mask."""
    if isinstance(index, Tensor):
        return index.dtype == torch.bool and index.shape == part.shape
    several = index if isinstance(index, tuple) else (index,)
    return all(one is ... or (isinstance(one, slice) and one == slice(None)) for one in several)


def mixes(name: str, part: Tensor, cut: int, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a function, by its name, mixes numbers of a part along the dimension that is cut."""
    count = part.dim()
    if name in ("layer_norm", "rms_norm"):
        shape = keywords.get("normalized_shape", args[1] if len(args) > 1 else part.shape)
        return cut >= count - len(shape)
    if name in ("renorm", "renorm_"):  # along all dimensions but one
        return any(dim % count != cut for dim in _dims(keywords, args, 2) or ())
    if name in _REDUCED:
        dims = {dim % count for dim in _dims(keywords, args, _REDUCED[name]) or ()}
        if name in _PLACES:
            return cut in dims or (not dims and name.startswith("arg"))
        return cut in dims and len(dims) < count  # of one number of all it is seen whether somebody needs it
    if name in _ALONG:
        place, usual = _ALONG[name]
        dims = _dims(keywords, args, place) or (() if usual is None else (usual,))
        return not dims or any(dim % count == cut for dim in dims)
    return name in _MIXES


def _dims(keywords: Mapping[str, Any], args: Sequence[Any], place: int) -> Sequence[int] | None:
    """The dimensions that a call says, or None."""
    said = keywords.get("dim", keywords.get("axis", args[place] if len(args) > place else None))
    several = said if isinstance(said, list | tuple) else (said,)
    return several if all(isinstance(one, int) and not isinstance(one, bool) for one in several) else None


def _adds_up(name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether one number that a function gives is a sum, over all numbers, of what each gives by itself."""
    if name in _NORMS:
        return keywords.get("p", keywords.get("ord", args[1] if len(args) > 1 else None)) == 1
    return name in _SUMS or (name in _LOSSES and keywords.get("reduction") == "sum")


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function of torch, or of the property that it reads."""
    name = getattr(func, "__name__", "")
    return getattr(func, "__self__", func).__name__ if name == "__get__" else name


def _refuse(part: Tensor, name: str) -> NoReturn:
    whole: Whole = getattr(part, _WHOLE)
    hint = "; a penalty may have p.pow(2).sum() or p.abs().sum(), of which each part gives its share"
    if name in _LEAVES:
        hint = "; tulle.full_state_dict(model), called on every rank, gives rank 0 all of it"
    raise ModelError(whole.refusal(name) + (hint if name in _NORMS | _LEAVES else ""))


def _check_gradients(given: Iterable[Tensor]) -> None:
    for part in given:
        whole: Whole | None = getattr(part, _WHOLE, None)
        if whole is not None and (refusal := whole.refusal_of_gradient()) is not None:
            raise ModelError(refusal)
