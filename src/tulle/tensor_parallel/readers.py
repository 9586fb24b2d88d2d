"""`read_past`: which parameters the code of a model reads past the layers that have them.

    self.head = lambda hidden: hidden @ self.words.weight.T       # of a language model that ties by hand

Split, such a layer would give this code a rank's part for the whole, without a word where the shapes agree. What is
read is seen in the code's instructions: the chains of attributes that begin at `self`, also by way of a local variable,
of `getattr`, `get_submodule` and `get_parameter` with a name that is written there, and of the items of a list:

    layer = self.layers[0]                                        # of all items if the number is not written there
    return [x @ one.weight.T for one in self.layers], x @ layer.weight.T
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
_ANY = "*"
"""In a chain, any item of a list or mapping of modules."""
_BY_NAME = {"get_submodule", "get_parameter"}
"""Methods of modules that take a chain as their argument."""
_NOTHING = {"PUSH_NULL", "PRECALL", "NOP", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "FOR_ITER"}
"""Names of instructions that leave what is known of the stack as it is."""


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
            found: list[nn.Module | None] = [module]
            for name in path:
                within = [one._modules for one in found if one is not None]
                found = [
                    child
                    for children in within
                    for child in (children.values() if name == _ANY else [children.get(name)])
                ]
            for one in found:
                # Not the attribute: to ask a parametrization or a property would compute it.
                if one is not None and (parameter := one._parameters.get(last)) is not None:
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
    codes = [method.__code__ for method in methods if method.__code__.co_argcount]
    return frozenset(chain for code in codes for chain in _chains_in(code, {code.co_varnames[0]: {()}}))


def _chains_in(code: CodeType, aliases: dict[str, set[Chain]]) -> Iterator[Chain]:
    """Those in a method's instructions, and in the functions that it defines.

    Args:
        code: Of either.
        aliases: By local variable the chains that it may stand for; of `self` the empty one.
    """
    chains: set[Chain] = set()  # what is on top of the stack may be
    is_asked = is_named = False  # whether what follows is given to getattr, and whether a constant has named a chain
    instructions = (one for one in dis.get_instructions(code) if one.opname not in _NOTHING)
    for instruction, following in pairwise(instructions):  # the last one returns
        does, value = instruction.opname, instruction.argval
        was_named, is_named = is_named, does in ("LOAD_CONST", "LOAD_SMALL_INT")
        if "FAST" in does or "DEREF" in does:
            chains = _of_variables(chains, instruction, following, aliases)
        elif does in ("LOAD_ATTR", "LOAD_METHOD"):
            chains = _extended(chains, value)
        elif is_named:
            chains = _named(chains, value, is_asked=is_asked, is_item=_takes_item(following))
        elif does == "GET_ITER":
            chains = _extended(chains, _ANY)
            aliases.setdefault(".0", set()).update(chains)  # in the function of a comprehension
        elif not _goes_on(instruction, was_named=was_named):
            chains = set()
        is_asked = (is_asked and bool(chains)) or (does == "LOAD_GLOBAL" and value == "getattr")
        if (is_named or does == "LOAD_ATTR") and following.argval not in _ABOUT:
            yield from (chain for chain in chains if len(chain) > 1)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _chains_in(constant, aliases)


def _extended(chains: set[Chain], name: str) -> set[Chain]:
    return {(*chain, name) for chain in chains}


def _of_variables(
    chains: set[Chain], instruction: dis.Instruction, following: dis.Instruction, aliases: dict[str, set[Chain]]
) -> set[Chain]:
    """Chains that an instruction on local variables leaves; of one that stores or loads two, both are told."""
    value, does = instruction.argval, instruction.opname
    first, *_, last = value if isinstance(value, tuple) else (value, value)
    if does.startswith("STORE"):
        aliases.setdefault(first, set()).update(chains)
    if "LOAD" not in does:
        return set()
    return _extended(chains, _ANY) if _takes_item(following) else aliases.get(last, set())


def _named(chains: set[Chain], value: object, *, is_asked: bool, is_item: bool) -> set[Chain]:
    """Chains that a constant goes on with: the name of an attribute or of a path, or which item."""
    if is_item:
        return _extended(chains, _ANY if isinstance(value, int) and value < 0 else str(value))
    if not isinstance(value, str):
        return set()
    by_path = {(*chain[:-1], *value.split(".")) for chain in chains if chain and chain[-1] in _BY_NAME}
    return by_path or (_extended(chains, value) if is_asked else set())


def _goes_on(instruction: dis.Instruction, *, was_named: bool) -> bool:
    """Whether an instruction gives what a constant before it has named."""
    return _takes_item(instruction) or (was_named and instruction.opname.startswith("CALL"))


def _takes_item(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr.startswith("[")
    )
