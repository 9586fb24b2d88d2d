"""What functions of torch do with the numbers of a tensor, by the functions' names.

It decides what may be done to a part of a parameter (`tulle.parts`), or of a gradient: what treats every number by
itself does to the part what it would do to the whole; what goes by where numbers lie, or mixes those along the
dimension that is cut, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_map_only

T = TypeVar("T", bound=Tensor)

OF_NO_VALUES = frozenset(
    accessor
    for name in ("grad", "requires_grad", "is_leaf", "_version", "dtype", "device")
    for accessor in (getattr(vars(torch._C.TensorBase)[name], kind) for kind in ("__get__", "__set__", "__delete__"))
)
"""What may be asked of any tensor as it is: all that `zero_grad` asks, and that who fetches rows asks."""
_INDEXED = {"__getitem__", "__setitem__"}
_BY_PLACE = _INDEXED | {
    *("unbind", "flip", "roll", "tril", "tril_", "triu", "triu_", "eye", "fill_diagonal_", "masked_scatter_"),
    *("index_add_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_", "scatter_add_", "scatter_reduce_"),
    *("fliplr", "flipud", "rot90", "take_along_dim", "gather", "take", "scatter", "scatter_add", "scatter_reduce"),
    *("channel_shuffle", "multinomial", "argwhere", "__reversed__"),
}
"""Names of what depends on where a number lies."""
_WRITE = {"__setitem__", "__set__", "__delete__"} | {
    f"__i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
}
"""Names of operators that write; of functions the names end in an underscore."""
LEAVES_TORCH = {"numpy", "tolist", "__array__", "__dlpack__"}
"""Names of what takes the numbers out of torch, where nothing knows any more that they are a part."""
DROPS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout"}
"""Names of what gives its argument with random numbers taken out."""
DRAWS = {
    *("uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "log_normal_", "random_", "view_as"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "poisson", "cauchy_", "geometric_"),
    *("dropout_", *DROPS),
}
"""Names of what draws random numbers, methods of tensors or functions of `torch.nn.init`; by the last of the first line
`orthogonal_` does, and nobody else needs it of a parameter."""
PRODUCTS = {
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
    *("histc", "histogram", "trace", "dist", "svd", "svd_lowrank", "pca_lowrank", "linalg_svd", "linalg_svdvals"),
    *("linalg_matrix_norm", "linalg_matrix_rank", "linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh"),
    *("det", "logdet", "slogdet", "linalg_det", "linalg_slogdet", "linalg_cond"),
}
"""Names of what may give a part's shape, or takes all of a part, and mixes numbers along several dimensions."""
_ALONG: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax"), (1, None)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumsum_", "cumprod_"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), (2, -1)),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
    "msort": (9, 0),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "gumbel_softmax": (4, -1),
}
"""By name of what mixes numbers along a dimension, and mostly gives a part's shape: which argument says the dimension,
and what that is if none does; None for all."""
REDUCED: Mapping[str, int] = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "max", "min", "amax", "amin", "aminmax"), 1),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean", "logsumexp", "median", "nanmedian"), 1),
    **dict.fromkeys(("mode", "all", "any", "count_nonzero"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm", "quantile", "nanquantile", "kthvalue"), 2),
}
"""By name of what makes one number of those along a dimension: which argument says it, if it is not to be all."""
_PLACES = {"argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "kthvalue"}
"""Names of those that also give where it lies."""
_USUAL: Mapping[str, tuple[int]] = {"mode": (-1,), "kthvalue": (-1,)}
"""By name of those that go along one dimension if none is said: which."""
LIKE = {"to", "type_as"}
"""Names of what asks a tensor that another is to be like for its dtype and device alone."""
LOOKUPS = frozenset({functional.embedding, functional.embedding_bag})
"""What looks rows up by their numbers: the first argument has these, the second is the table."""
PLAIN = {"as_subclass", "_base", "grad"}
"""Names of what gives a plain tensor, or one that is another's."""
_PLACED: Mapping[str, int] = {
    **dict.fromkeys(
        ("flip", "gather", "index_select", "narrow", "select", "index_add", "index_add_", "index_copy_"), 1
    ),
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_", "scatter_add", "scatter_add_"), 1),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "unbind"), 1),
    **dict.fromkeys(("roll", "take_along_dim", "chunk", "split", "tensor_split"), 2),
}
"""By name of what goes by where numbers lie along a dimension: which argument says it."""
_PLACED_FIRST = {"unbind", "chunk", "split", "tensor_split"}
"""Names of those that take the first if none does."""
EACH_BY_ITSELF = ("_foreach_", "_fused_", "_amp_", "new_")
"""How the names of functions begin that treat every number of many tensors by itself, or ask for dtype and device."""
ONE_NUMBER_OF_EACH: Mapping[str, Callable[..., Tensor]] = {
    "_foreach_norm": torch.linalg.vector_norm,
    "_foreach_max": torch.max,
}
"""Those of them that give one number of each tensor, and what gives it of one."""


def goes_by_place(name: str, part: Tensor, args: Sequence[Any]) -> bool:
    """Whether what a function gives of a part, or writes in it, depends on where numbers lie."""
    return name in _BY_PLACE and not (name in _INDEXED and _is_of_all(args[1], part))


def goes_along(name: str, part: Tensor, cut: int, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether what a function gives of a part, or writes in it, depends on where along a dimension numbers lie.

    Example:
        >>> part = torch.ones(2, 3)
        >>> [goes_along("__getitem__", part, 0, [part, index], {}) for index in (1, (slice(None), 1), part > 0)]
        [True, False, False]
    """
    if name in _PLACED:
        dims = dims_of(keywords, args, _PLACED[name]) or ((0,) if name in _PLACED_FIRST else None)
        return dims is None or any(dim % part.dim() == cut for dim in dims)
    if name in _INDEXED:
        return not _is_of_all(args[1], part) and not _takes_all(args[1], part, cut)
    return name in _BY_PLACE


def mixes(name: str, part: Tensor, cut: int, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a function, by its name, mixes numbers of a part along the dimension that is cut."""
    count = part.dim()
    if name in ("layer_norm", "rms_norm"):
        shape = keywords.get("normalized_shape", args[1] if len(args) > 1 else part.shape)
        return cut >= count - len(shape)
    if name in ("renorm", "renorm_"):  # along all dimensions but one
        return any(dim % count != cut for dim in dims_of(keywords, args, 2) or ())
    if name in REDUCED:
        dims = {dim % count for dim in dims_of(keywords, args, REDUCED[name]) or _USUAL.get(name, ())}
        if name in _PLACES:
            return cut in dims or (not dims and name.startswith("arg"))
        return cut in dims and len(dims) < count  # of one number of all it is seen whether somebody needs it
    if name in _ALONG:
        place, usual = _ALONG[name]
        dims = dims_of(keywords, args, place) or (() if usual is None else (usual,))
        return not dims or any(dim % count == cut for dim in dims)
    return name in _MIXES


def dims_of(keywords: Mapping[str, Any], args: Sequence[Any], place: int) -> Sequence[int] | None:
    """The dimensions that a call says, or None."""
    said = keywords.get("dim", keywords.get("axis", args[place] if len(args) > place else None))
    several = said if isinstance(said, list | tuple) else (said,)
    return several if all(isinstance(one, int) and not isinstance(one, bool) for one in several) else None


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function of torch, or of the property that it reads."""
    name = getattr(func, "__name__", "")
    return getattr(func, "__self__", func).__name__ if name == "__get__" else name


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function of torch writes in what it is given, by its name.

    Example:
        >>> writes(torch.Tensor.add_), writes(torch.Tensor.__setitem__), writes(torch.add)
        (True, True, False)
    """
    name = getattr(func, "__name__", "")
    return name in _WRITE or (name.endswith("_") and not name.endswith("__"))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def meeting(func: Callable[..., Any], args: Sequence[Any], given: list[Tensor]) -> list[list[Tensor]]:
    """Which of the tensors that a function is given meet: of those in lists (`_foreach_mul_`) what is at one place.

    Example:
        >>> one, other = torch.ones(1), torch.ones(2)
        >>> [len(together) for together in meeting(torch._foreach_norm, [[one, other]], [one, other])]
        [1, 1]
    """
    if not name_of(func).startswith("_foreach_"):
        return [given]
    lists = [value for value in args if isinstance(value, list | tuple)]
    return [[*tensors_in(place)] for place in zip(*lists, strict=False)]


def at_places(places: Tensor, dim: int, given: Any, shape: Sequence[int]) -> Any:
    """What was given to a function, of tensors of one shape some places along a dimension only.

    Example:
        >>> at_places(torch.tensor([1]), 0, (torch.tensor([5, 6]), 2), (2,))
        (tensor([6]), 2)
    """

    def held(one: Tensor) -> Tensor:
        return one.index_select(dim, places.to(one.device)) if one.shape == shape else one

    return tree_map_only(Tensor, held, given)


def fits(tensor: Tensor, part: Tensor) -> bool:
    """Whether a tensor has a part's shape, or is one number."""
    return not tensor.dim() or tensor.shape == part.shape


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number for all, whatever its dimensions, and not a place."""
    return tensor.numel() == 1 and tensor.is_floating_point()


def _is_of_all(index: Any, part: Tensor) -> bool:
    """Whether an index takes numbers wherever they lie: all of them, or those under a mask."""
    if isinstance(index, Tensor):
        return index.dtype == torch.bool and index.shape == part.shape
    several = index if isinstance(index, tuple) else (index,)
    return all(one is ... or (isinstance(one, slice) and one == slice(None)) for one in several)


def _takes_all(index: Any, part: Tensor, cut: int) -> bool:
    """Whether an index takes all numbers along a dimension, or those under a mask that is a part as this one is."""
    if isinstance(index, Tensor) and type(index) is type(part) and index.dtype == torch.bool:
        return True
    several = index if isinstance(index, tuple) else (index,)
    taken, dim = sum(one is not None and one is not ... for one in several), 0
    for one in several:
        if one is ...:
            dim += part.dim() - taken
        elif one is not None:
            if isinstance(one, Tensor) and one.dtype == torch.bool and one.dim() > 1:
                return False
            if dim == cut and not (isinstance(one, slice) and one == slice(None)):
                return False
            dim += 1
    return True


def taken_together(kind: type[T]) -> type[T]:
    """Have torch's clipping take the norms of gradients of a class in one call, as it does of plain tensors.

    Asked for one by one, each norm over all ranks is an exchange. Torch says the same of its `DTensor`.
    """
    cast("list[type[Tensor]]", _foreach_supported_types).append(kind)
    return kind


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs: `vmap`, `grad`, `jacrev` or the like."""
    return cast("Any", torch._C)._functorch.maybe_current_level() is not None


def refuses_saved_hooks(error: RuntimeError) -> bool:
    """Whether torch will not run `torch.func.grad` or its kin, as somebody looks after what autograd saves."""
    return "saved tensor hooks" in str(error)


def unwrapped(tensor: Tensor) -> Tensor:
    """A tensor as it is beneath the transforms of `torch.func` that run: all of a batch, within `vmap`."""
    functorch = cast("Any", torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
