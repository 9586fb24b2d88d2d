"""`read_past`: which parameters the code of a model reads past the layers that have them.

    self.head = lambda hidden: hidden @ self.words.weight.T       # of a language model that ties by hand

Split, such a layer would give this code a rank's part for the whole, without a word where the shapes agree. What is
read is seen in the code's instructions: the chains of attributes that begin at `self`, also by way of a local variable,
of `getattr`, `get_submodule` and `get_parameter` with a name that is written there, and of the items of a list:

    layer = self.layers[0]                                        # of all items if the number is not written there
    return [x @ one.weight.T for one in self.layers], x @ layer.weight.T

Where forward comes to it, all of a module is read too, as for `torch.func.functional_call`:

    adapted = {name: p - self.rate * g for (name, p), g in zip(self.net.named_parameters(), gradients)}

and what methods, and functions that they call, read of their arguments is read of every layer that is handed over:

    return self.head(hidden, self.words)                          # whose forward has `words.weight`
    return joined(hidden, [self.queries, self.keys])              # which has `layer.weight for layer in layers`
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise
from types import CodeType, FunctionType

from torch import nn

from tulle.derived import is_derived

Chain = tuple[str, ...]
_ABOUT = frozenset({"data_ptr", "device", "dim", "dtype", "grad", "is_cuda", "is_meta", "numel", "requires_grad"})
"""What may be asked of a parameter without its values."""
_BEFORE = ("init", "reset", "tie", "get_", "set_", "extra_repr")
"""How the names of methods begin that count only where forward comes to them, underscores left out."""
_ANY = "*"
"""In a chain, any item of a list or mapping of modules."""
_HANDED = ""
"""In a chain, first: an argument; last: what it leads to is handed over."""
_BY_NAME = {"get_submodule", "get_parameter"}
"""Methods of modules that take a chain as their argument."""
_ALL = {"parameters", "named_parameters", "state_dict"}
"""Methods that give all parameters of a module and of what is in it."""
_OTHERWISE = {"getattr", "vars", "_parameters", "__dict__", "__getattr__"}
"""Other names by which code comes to the parameters of a module."""
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_NOTHING = {"PUSH_NULL", "PRECALL", "NOP", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "FOR_ITER"}
"""Names of instructions that leave what is known of the stack as it is."""
_OF_COMPREHENSIONS = {"LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST", "BUILD_SET", "BUILD_MAP"}
"""Between what one goes through and its variable, from Python 3.12 on, which has them in the method itself."""


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
    modules = list(model.modules())
    kinds = {type(module) for module in modules}
    reached = _reached(kinds)
    of_arguments = _read_of_arguments(kinds, reached)
    for module in modules:
        for method, chains in _chains_of(type(module)).items():
            if method.lstrip("_").startswith(_BEFORE) and method not in reached:
                continue
            for *path, last in chains:
                for one in _at(module, path) if last != _HANDED or of_arguments else ():
                    if last == _HANDED:
                        yield from _handed(one, of_arguments) if method in reached else ()
                    elif last in _ALL:
                        yield from one.parameters() if method in reached else ()
                    # Not the attribute: to ask a parametrization or a property would compute it.
                    elif (parameter := one._parameters.get(last)) is not None:
                        yield parameter


def _read_of_arguments(kinds: Iterable[type[nn.Module]], reached: set[str]) -> set[str]:
    """Names of attributes that methods and functions to which forward comes read of their arguments, or of items."""
    methods = [method for kind in kinds for name, method in methods_of(kind) if name in reached]
    begin = {id(method.__code__): 1 for method in methods}  # after self
    codes = {id(code): code for one in (*methods, *_functions_of(methods)) for code in _codes_in(one.__code__)}
    arguments = [(code, _arguments(code)[begin.get(key, 0) :]) for key, code in codes.items()]
    chains = (chain for code, names in arguments for chain in _chains_in(code, {name: {(_HANDED,)} for name in names}))
    return {last for _, *path, last in chains if {*path} <= {_ANY}} - {_HANDED, _ANY}


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _functions_of(methods: Iterable[FunctionType]) -> list[FunctionType]:
    """Functions of modules that are no method, to which some methods come by their names."""
    found: dict[int, FunctionType] = {}
    following = [*methods]
    while following:
        function = following.pop()
        for name in {*_names_in(function.__code__)}:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and not called.__module__.startswith("torch."):
                plain = inspect.unwrap(called)
                if isinstance(plain, FunctionType) and id(plain) not in found:
                    found[id(plain)] = plain
                    following.append(plain)
    return [*found.values()]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's, and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _handed(module: nn.Module, names: set[str]) -> Iterator[nn.Parameter]:
    """Parameters of a module that is handed to what reads some names of its arguments."""
    yield from module.parameters() if names & _ALL else ()
    yield from (parameter for name in names if (parameter := module._parameters.get(name)) is not None)


def _at(module: nn.Module, path: Sequence[str]) -> list[nn.Module]:
    """The modules to which a chain of names leads."""
    found = [module]
    for name in path:
        children = [one._modules.values() if name == _ANY else [one._modules.get(name)] for one in found]
        found = [child for some in children for child in some if child is not None]
    return found


def _reached(kinds: Iterable[type[nn.Module]]) -> set[str]:
    """Names of methods that forward calls, directly or not, and of all else that these read."""
    names: set[str] = set()
    following = {"forward"}
    while following:
        names |= following
        codes = [method.__code__ for kind in kinds for name, method in methods_of(kind) if name in following]
        following = {name for code in codes for name in _names_in(code)} - names
    return names


@cache
def names_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    """Names that are in the methods of a class to which its forward comes, and that of these."""
    return frozenset(_reached([kind]))


@cache
def is_used_past_forward(kind: type[nn.Module], name: str) -> bool:
    """Whether methods of a class to which forward does not come have a name, but for those that set it up."""
    return any(
        name in _names_in(method.__code__)
        for own, method in methods_of(kind)
        if own not in names_in_forward(kind) and not own.lstrip("_").startswith(_BEFORE)
    )


@cache
def may_read(kind: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class, or what it comes to in that class, may read an own parameter of a name."""
    names = names_in_forward(kind)
    codes = [method.__code__ for own, method in methods_of(kind) if own in names]
    return not names.isdisjoint(_ALL | _BY_NAME | _OTHERWISE) or any(_takes(code, name) for code in codes)


def _takes(code: CodeType, name: str) -> bool:
    """Whether a method takes an attribute of a name, of anything, for more than is asked without its values."""
    pairs = pairwise(one for one in dis.get_instructions(code) if not _does_nothing(one))
    within = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(one.argval == name and following.argval not in _ABOUT for one, following in pairs) or any(
        _takes(constant, name) for constant in within
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def methods_of(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """The methods of a class, but for torch's and tulle's: those that are decorated and properties as written."""
    for one in kind.__mro__:
        if is_derived(one) or not issubclass(one, nn.Module) or one.__module__.startswith("torch."):
            continue
        for name, value in vars(one).items():
            if isinstance(value, property | cached_property):
                value = value.fget if isinstance(value, property) else value.func
            if isinstance(value, FunctionType) and isinstance(method := inspect.unwrap(value), FunctionType):
                yield name, method


@cache
def _chains_of(kind: type[nn.Module]) -> dict[str, frozenset[Chain]]:
    """Chains of two and more attributes that the methods of a class follow from `self`, by the methods' names."""
    chains: dict[str, frozenset[Chain]] = {}
    for name, method in methods_of(kind):
        code = method.__code__
        if code.co_argcount:
            chains[name] = chains.get(name, frozenset()).union(_chains_in(code, {code.co_varnames[0]: {()}}))
    return chains


def _chains_in(code: CodeType, aliases: dict[str, set[Chain]]) -> Iterator[Chain]:
    """Those in a method's instructions, and in the functions that it defines.

    Args:
        code: Of either.
        aliases: By local variable the chains that it may stand for; of `self` the empty one.
    """
    chains: set[Chain] = set()  # what is on top of the stack may be
    given_to = ""  # the function that is: getattr, isinstance, or next, which takes the first only of all there are
    is_named = False  # whether a constant has named a chain
    instructions = (one for one in dis.get_instructions(code) if not _does_nothing(one))
    for instruction, following in pairwise(instructions):  # the last one returns
        does, value = instruction.opname, instruction.argval
        was_named, is_named = is_named, does in ("LOAD_CONST", "LOAD_SMALL_INT")
        if "FAST" in does or "DEREF" in does:
            chains = _of_variables(chains, instruction, following, aliases)
        elif does in _ATTRIBUTES:
            chains = _extended(chains, value)
        elif is_named:
            chains = _named(chains, value, is_asked=given_to == "getattr", is_item=_takes_item(following))
        elif does == "GET_ITER":
            chains = _extended(chains, _ANY)
            aliases.setdefault(".0", set()).update(chains)  # in the function of a comprehension
        elif not _goes_on(instruction, was_named=was_named):
            chains = set()
        given_to = value if does == "LOAD_GLOBAL" else given_to if chains else ""
        is_read = (is_named or does == "LOAD_ATTR") and following.argval not in _ABOUT and given_to != "isinstance"
        takes_all = does in _ATTRIBUTES and given_to != "next"
        yield from (chain for chain in chains if len(chain) > 1 and (takes_all if chain[-1] in _ALL else is_read))
        if does == "LOAD_ATTR" and "NULL" not in instruction.argrepr and following.opname not in _ATTRIBUTES:
            yield from ((*chain, _HANDED) for chain in chains)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _chains_in(constant, aliases)


def _does_nothing(instruction: dis.Instruction) -> bool:
    does = instruction.opname
    return does in _NOTHING or (does in _OF_COMPREHENSIONS and not (does.startswith("BUILD") and instruction.arg))


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
