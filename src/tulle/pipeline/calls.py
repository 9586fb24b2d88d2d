"""`Calls`: which modules a model called, in which order, from within which, and how long each took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tulle.parts import is_transformed
from tulle.pipeline.hooks import hears_gradients, is_hooked
from tulle.pipeline.placeholder import is_about_shape
from tulle.pipeline.recompute import intercept_functions, is_within_function
from tulle.pipeline.trial import trial
from tulle.pipeline.unfit import kinds_of, refuse_replaced
from tulle.pipeline.written import memory_of
from tulle.traits import is_compiled


@dataclass(slots=True)
class Calls:
    """What was seen of one run, by the names of modules in the order of their first calls."""

    chains: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    """Of each call of a module, the names of the modules that it was called from, the outermost first."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Of all calls of a module, with what is called within."""
    operations: Counter[str] = field(default_factory=Counter)
    """Of a module's own forward, without what it calls: operations on what modules with parameters have made."""
    borrowers: set[str] = field(default_factory=set)
    """Modules in whose calls parameters were read, or modules with buffers called, that are none of theirs, such as a
    table that a decoder is handed, or that were called while the user's hooks were on modules within them, for as long
    as a forward wants features say."""
    asking: set[str] = field(default_factory=set)
    """Modules whose own forward runs a backward, such as one that gives forces, the gradients of an energy, puts a hook
    on a tensor's gradient, or calls another module with other tensors for its parameters, within a transform
    (`torch.func`), or in a `Function`; and those that make parameters on the way, or a module that has some."""

    def children(self) -> dict[str, list[str]]:
        """Of each module those whose first call came directly from within its call.

        A model with a `__call__` of its own (GPyTorch's) is not seen itself: what is called from nowhere is its.
        """
        found: dict[str, list[str]] = {}
        for name, chains in self.chains.items():
            if name:
                found.setdefault(chains[0][-1] if chains[0] else "", []).append(name)
        return found


def watch(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Calls:
    """Run a model's forward, without gradients if that does, and see its calls.

    What is within a compiled module is its own.

    Raises:
        ModelError: If the forward puts other modules in place of some.
    """
    kinds = kinds_of(model)
    calls = trial(lambda: _watched(model, args, kwargs))
    refuse_replaced(kinds, model)
    return calls


def _watched(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Calls:
    calls, begins_s = Calls(), []
    stack: list[nn.Module] = []
    foreign = _Foreign()
    names = {module: name for name, module in model.named_modules()}
    compiled = [module for module in names if is_compiled(module)]
    whole = {inner for module in compiled for inner in module.modules() if inner is not module}

    def made(parameters: Iterable[nn.Parameter]) -> None:
        asked()
        foreign.take(parameters)

    def enter(module: nn.Module, _: object) -> None:
        if module not in names:  # a copy that forward makes (copy.deepcopy), with our hooks: part of who calls it
            made(module.parameters())
            return
        if is_within_function():  # its backward may call the module again, on one rank: who applies it stays whole
            calls.asking.update(names[outer] for outer in stack[-1:] if any(True for _ in module.parameters()))
            return
        calls.chains.setdefault(names[module], []).append(tuple([names[outer] for outer in stack]))
        calls.asking.update(names[outer] for outer in stack[-1:] if _is_called_otherwise(module))
        calls.borrowers |= _looked_into(module, names[module])
        calls.borrowers.update(names[outer] for outer in _handed(module, stack, inside))
        stack.append(module)
        begins_s.append(time.perf_counter())

    def leave(module: nn.Module, _: object, __: object) -> None:
        if is_within_function() or module not in names:
            return
        name = names[stack.pop()]
        calls.time_s[name] = calls.time_s.get(name, 0.0) + time.perf_counter() - begins_s.pop()

    inside = {module: set(module.modules()) for module in names}
    having = _having(names)

    def computed() -> None:
        calls.operations.update(map(names.__getitem__, stack[-1:]))

    def asked() -> None:
        calls.asking.update(map(names.__getitem__, stack[-1:]))

    def read(parameter: nn.Parameter, *, is_made: bool) -> None:
        # One that nobody had is lent, to a module that runs.
        owners = having.get(id(parameter)) or {
            module for module in stack if any(one is parameter for one in module._parameters.values())
        }
        calls.borrowers.update(names[module] for module in stack if owners and inside[module].isdisjoint(owners))
        foreign.read += [] if owners else [_Read(parameter, list(stack), is_made=is_made)]

    intercept_functions()
    seen = [module for module in names if module not in whole]
    with (
        _hooked(seen, enter, leave),
        _making(names, made),
        _uncompiled() if compiled else nullcontext(),
        _Reads(model.parameters(), read, computed, asked),
    ):
        model(*args, **kwargs)
    calls.borrowers.update(names[module] for module in foreign.readers())
    calls.asking.update(
        names[module] for module in foreign.makers([one for one in names if names[one] in calls.borrowers])
    )
    return calls


@dataclass(frozen=True, slots=True)
class _Read:
    """A parameter that an operation read while some modules ran, the innermost last.

    Args:
        parameter: It.
        running: These modules.
        is_made: Whether forward has made it, of others or of what it computed: it has the memory of that.
    """

    parameter: nn.Parameter
    running: Sequence[nn.Module]
    is_made: bool


@dataclass(slots=True)
class _Foreign:
    """Parameters that were read, and that no module has which the model had, or which runs."""

    made: dict[int, nn.Parameter] = field(default_factory=dict)
    """Those of modules that forward makes, copies too, by their numbers."""
    read: list[_Read] = field(default_factory=list)

    def take(self, made: Iterable[nn.Parameter]) -> None:
        """Take note of parameters that forward makes."""
        self.made.update((id(parameter), parameter) for parameter in made)

    def readers(self) -> set[nn.Module]:
        """Modules in whose calls others than those made were read; copies are read before they are called, too."""
        others = (one for one in self.read if not one.is_made and id(one.parameter) not in self.made)
        return {module for one in others for module in one.running}

    def makers(self, borrowers: Collection[nn.Module]) -> set[nn.Module]:
        """Modules that make some by themselves; of a weight that was handed on, the one around that has it."""
        within = ([module for module in one.running if module not in borrowers] for one in self.read if one.is_made)
        return {module for running in within for module in running[-1:]}


@contextmanager
def _hooked(modules: Sequence[nn.Module], enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _making(known: Collection[nn.Module], made: Callable[[Iterable[nn.Parameter]], None]) -> Iterator[None]:
    """Tell of the parameters of other modules that are made within this context."""

    def registered(module: nn.Module, _: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and module not in known:
            made((parameter,))

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _looked_into(module: nn.Module, name: str) -> set[str]:
    """The module's name, if the user's hooks are on modules within it."""
    return {name} if any(is_hooked(inner) for inner in module.modules() if inner is not module) else set()


def _handed(
    module: nn.Module, stack: Sequence[nn.Module], inside: Mapping[nn.Module, set[nn.Module]]
) -> list[nn.Module]:
    """Of the modules that run those that do not have a called module with buffers. Parameters tell for themselves."""
    has_buffers = next(module.buffers(), None) is not None
    return [outer for outer in stack if has_buffers and module not in inside[outer]]


def _is_called_otherwise(module: nn.Module) -> bool:
    """Whether a caller has put other tensors in the places of parameters, or transforms the call: on one rank, then."""
    if is_transformed():
        return True
    given = (one for inner in module.modules() for one in inner._parameters.values())
    return any(one is not None and not isinstance(one, nn.Parameter) for one in given)


def _uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled modules run as they were written: the compiler would trace what looks on."""
    return torch.compiler.set_stance("force_eager")


def _having(modules: Iterable[nn.Module]) -> dict[int, set[nn.Module]]:
    """The modules that have each parameter, by its identity."""
    having: dict[int, set[nn.Module]] = {}
    for module in modules:
        for _, parameter in module.named_parameters(recurse=False):
            having.setdefault(id(parameter), set()).add(module)
    return having


_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.register_hook)
"""What runs a backward, or takes part in one: of tensors that live on one rank."""


class _Reads(TorchFunctionMode):
    """Tells of each parameter that an operation reads, of each operation on what was made of some, and of backwards."""

    def __init__(
        self, own: Iterable[Tensor], read: Callable[..., None], computed: Callable[[], None], asked: Callable[[], None]
    ) -> None:
        super().__init__()
        self._read, self._computed, self._asked = read, computed, asked
        self._made = WeakTensorKeyDictionary()
        self._memory = set(map(memory_of, own))
        """That of the model's own parameters, and what operations have taken since: what was there before has none."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look, and let through."""
        if is_about_shape(func):
            return func(*args, **(kwargs or {}))
        if func in _BACKWARDS:
            self._asked()
        given = _tensors((args, kwargs))
        parameters = [one for one in given if isinstance(one, nn.Parameter)]
        for parameter in parameters:
            self._read(parameter, is_made=memory_of(parameter) in self._memory)
        if any(one in self._made for one in given):
            self._computed()
        elif not parameters:
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            self._made[one] = True
        self._memory.update({*map(memory_of, _tensors(result))}.difference(map(memory_of, given)))
        return result


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def pieces_of(model: nn.Module, calls: Calls, weights: dict[str, float], largest: float) -> list[str]:
    """Modules that stay whole: as large as can be, but for those that weigh more than `largest` and can be cut.

    One that reads parameters of others is none: what it does itself runs between modules, where all can be read. Nor is
    one without state that is called in several places, an activation say: it runs at each where its arguments live, or
    values would go to its stage and back. One that runs a backward of its own or hooks a gradient is not cut, for that
    goes through it all; nor is one that calls a module which another piece calls, too (positions that all layers turn
    by): that would run at one stage in the midst of a piece of another.

    Args:
        model: The model.
        calls: What was seen of a run.
        weights: What each called module weighs, with what is called within.
        largest: What a piece may weigh.
    """
    kept: set[str] = set()
    cut = set(calls.borrowers)
    while True:
        pieces = _cut_up(model, calls, weights, largest, kept, cut)
        if not (within := _pieces_within(pieces, calls)):
            return pieces
        callers = {chain[-1] for piece in within for chain in calls.chains[piece]} - {""} - cut - kept
        cut |= set() if callers else {outer for around in within.values() for outer in around}
        kept = (kept | callers) - cut


def _cut_up(
    model: nn.Module,
    calls: Calls,
    weights: dict[str, float],
    largest: float,
    kept: Collection[str],
    cut: Collection[str],
) -> list[str]:
    """The pieces if some modules are kept whole, and some cut, whatever they weigh."""
    children_of = calls.children()

    def within(name: str) -> list[str]:
        is_whole = name in kept or name in calls.asking or hears_gradients(model.get_submodule(name))
        children = [] if is_whole else children_of.get(name, [])
        children = [child for child in children if len(calls.chains[child]) == 1 or _has_state(model, child)]
        has_own = next(model.get_submodule(name).named_parameters(recurse=False), None) is not None
        is_small = weights.get(name, 0.0) <= (4 * largest if has_own else largest)
        if name and name not in cut and (is_small or not children):
            return [name]
        return [piece for child in children for piece in within(child)]

    return within("") or [""]


def _pieces_within(pieces: Sequence[str], calls: Calls) -> dict[str, set[str]]:
    """Of each piece that others call from within, as layers do a module that they share, these others."""
    whole = set(pieces)
    found = {piece: {outer for chain in calls.chains.get(piece, ()) for outer in chain} & whole for piece in pieces}
    return {piece: outer for piece, outer in found.items() if outer}


def _has_state(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    return any(True for _ in (*module.parameters(), *module.buffers()))


def coarsened(assignment: dict[str, int], calls: Calls) -> dict[str, int]:
    """The same assignment with fewer, larger modules: one that calls modules of one stage only stands for them.

    It must be called whenever they are, or another could call them past it.
    """
    return placed_as_one(assignment, around(list(assignment), calls))


def around(names: Sequence[str], calls: Calls) -> dict[str, tuple[str, ...]]:
    """Of each of some modules those that could be placed in its stead with all else that they call, outermost first."""
    not_always: set[str] = set()
    for name in names:
        chains = [frozenset(chain) for chain in calls.chains.get(name, ())] or [frozenset[str]()]
        not_always |= frozenset.union(*chains) - frozenset.intersection(*chains)
    unfit = not_always | calls.borrowers
    return {name: tuple(outer for outer in calls.chains.get(name, [()])[0] if outer not in unfit) for name in names}


def placed_as_one(assignment: Mapping[str, int], around: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The same assignment with each module that has only pieces of one stage in the stead of these.

    Args:
        assignment: The stage of each piece.
        around: Of each piece the modules that always call it, the outermost first.

    Example:
        >>> around = {"a.0": ["a"], "a.1": ["a"], "b.0": ["b"], "b.1": ["b"]}
        >>> placed_as_one({"a.0": 0, "a.1": 0, "b.0": 0, "b.1": 1}, around)
        {'a': 0, 'b.0': 0, 'b.1': 1}
    """
    stages: dict[str, set[int]] = {}
    for name, stage in assignment.items():
        for outer in around.get(name, ()):
            stages.setdefault(outer, set()).add(stage)
    result: dict[str, int] = {}
    for name, stage in assignment.items():
        result[next((outer for outer in around.get(name, ()) if len(stages[outer]) == 1), name)] = stage
    return result
