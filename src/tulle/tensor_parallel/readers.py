"""`read_past`: which parameters the code of a model reads past the layers that have them.

    self.head = lambda hidden: hidden @ self.words.weight.T       # of a language model that ties by hand

Split, such a layer would give this code a rank's part for the whole, without a word where the shapes agree. What is
read is seen in the code's instructions: the chains of attributes that begin at `self`.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType

from torch import nn

Chain = tuple[str, ...]
_ABOUT = frozenset({"data_ptr", "device", "dim", "dtype", "grad", "is_cuda", "is_meta", "numel", "requires_grad"})
"""What may be asked of a parameter without its values."""
_BEFORE = ("init", "reset", "tie", "get_", "set_", "extra_repr")
"""How the names of methods begin that no forward calls, underscores left out."""


def read_past(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of inner modules that methods of outer ones read, as far as attributes of `self` lead to them.

    Example:
        >>> class Tied(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words, self.body = nn.Embedding(8, 4), nn.Linear(4, 4)
        ...     def forward(self, ids):
        ...         return self.body(self.words(ids)) @ self.words.weight.T
        >>> [list(parameter.shape) for parameter in read_past(Tied())]
        [[8, 4]]
    """
    for module in model.modules():
        for *path, last in _chains_of(type(module)):
            found: nn.Module | None = module
            for name in path:
                found = None if found is None else found._modules.get(name)
            # Not the attribute: to ask a parametrization or a property would compute it.
            if found is not None and (parameter := found._parameters.get(last)) is not None:
                yield parameter


@cache
def _chains_of(kind: type[nn.Module]) -> frozenset[Chain]:
    """Chains of two and more attributes that the methods of a class, but for torch's own, follow from `self`."""
    own = [one for one in kind.__mro__ if issubclass(one, nn.Module) and not one.__module__.startswith("torch.")]
    methods = [
        method
        for one in own
        for name, method in vars(one).items()
        if isinstance(method, FunctionType) and not name.lstrip("_").startswith(_BEFORE)
    ]
    return frozenset(
        chain for method in methods if (code := method.__code__).co_argcount for chain in _chains_in(code, code)
    )


def _chains_in(code: CodeType, method: CodeType) -> Iterator[Chain]:
    """Those in a method's instructions, and in the functions that it defines."""
    chain: Chain | None = None
    for instruction, following in pairwise(dis.get_instructions(code)):  # the last one returns
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            loaded = instruction.argval  # of instructions that load two, both
            chain = () if (loaded[-1] if isinstance(loaded, tuple) else loaded) == method.co_varnames[0] else None
        elif chain is not None and instruction.opname == "LOAD_ATTR":
            chain = (*chain, instruction.argval)
            if len(chain) > 1 and following.argval not in _ABOUT:
                yield chain
        else:
            chain = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _chains_in(constant, method)
