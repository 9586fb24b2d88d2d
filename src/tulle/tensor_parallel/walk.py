"""`Walk`: goes through a model and splits what is registered, or what patterns of names say."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.names import as_names
from tulle.tensor_parallel.dropout import draw_apart
from tulle.tensor_parallel.groups import Group
from tulle.tensor_parallel.inside import inside
from tulle.tensor_parallel.joined import joined
from tulle.tensor_parallel.known import Known, is_bound_to_stay, only_names
from tulle.tensor_parallel.left import left_whole
from tulle.tensor_parallel.placement import place, placements_of
from tulle.tensor_parallel.region import Sequences
from tulle.tensor_parallel.registry import Factory, factory_of, is_alone, stack_of
from tulle.tensor_parallel.splitter import MisfitError, Splitter
from tulle.tensor_parallel.twin import misfit

logger = logging.getLogger("tulle")

Select = Sequence[str] | Mapping[str, str]
"""Patterns of module names, with what to do with each."""
AUTO, WHOLE, UNTOUCHED = "auto", "whole", ""
MOVES = (AUTO, WHOLE, "column", "row", "vocabulary")


@dataclass(slots=True)
class Walk:
    """One pass over some models, outermost modules first.

    Args:
        axis: Over which to split.
        moves: What to do with modules by pattern of their names; all that is registered is split if there are none.
        sequence: Whether to split stacks along sequences.
        smallest_bytes: Below which layers that stand alone stay whole, unless a pattern says otherwise.
        leave: Names of modules that stay whole, whatever a pattern says.
    """

    axis: Axis
    moves: Mapping[str, str]
    sequence: bool
    smallest_bytes: int
    leave: Collection[str] = ()
    seen: set[int] = field(default_factory=set)
    matched: set[str] = field(default_factory=set)
    split: list[nn.Module] = field(default_factory=list)
    split_scores: set[nn.Module] = field(default_factory=set)
    """Output layers that give split scores."""
    stacks: list[str] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    misfits: list[MisfitError] = field(default_factory=list)
    """Why modules were left to the layers in them."""
    by_hand: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the name of the module around them, the layers that patterns say to be columns or rows."""
    to: Splitter = field(init=False)

    def __post_init__(self) -> None:
        self.to = Splitter(self.axis)

    def visit(self, module: nn.Module, name: str, inherited: str) -> None:
        """Split a module, if a factory or a pattern knows how to, or else the modules within it."""
        move = self._move(name, inherited)
        if id(module) in self.seen or move == WHOLE or name in self.leave:
            return
        self.seen.add(id(module))
        factory = factory_of(module) if move == AUTO else None
        if move not in (AUTO, UNTOUCHED):
            self._by_hand(module, name, move)
        elif factory is not None and self._is_small(module):
            return
        elif factory is None or self._is_misfit(module, name, factory):
            self._visit_children(module, name, move)
            return
        else:
            factory(module, self.to.within(name))
        self.split.append(module)

    def _is_misfit(self, module: nn.Module, name: str, factory: Factory[nn.Module]) -> bool:
        """Whether a module is left to the layers in it, as nobody asked for it and it cannot be split as a whole."""
        found = None if self.moves or is_alone(module) else misfit(module, factory, self.axis, name)
        self.misfits += [found] if found else []
        return found is not None

    def start(self, model: nn.Module) -> None:
        """Split a model.

        Raises:
            ModelError: If any of it was split before, or a factory or a pattern does not fit it.
        """
        if split := [name for name, module in model.named_modules() if placements_of(module)]:
            raise ModelError(
                f"{split[0] or type(model).__name__} was split before: call tensor_parallel.apply once, with all "
                "that is to be split"
            )
        self.known = Known.of(model)
        self.by_hand.clear()
        self.visit(model, "", UNTOUCHED if self.moves else AUTO)
        for around, layers in self.by_hand.items():
            if {"column", "row"} <= {*layers.values()}:
                self._draw_apart(model.get_submodule(around), around, layers)

    def finish(self, models: Sequence[nn.Module]) -> None:
        """Let split modules see parts as they are.

        Raises:
            ModelError: If anything that was asked for has not come about, or a tied parameter is half split.
        """
        names = " and ".join(type(model).__name__ for model in models)
        for pattern in self.moves:
            if pattern not in self.matched:
                raise ModelError(
                    f"tensor_parallel.apply: the pattern {pattern!r} matches no module of the {names}: "
                    "give names as named_modules() does"
                )
        if not self.split:
            raise ModelError(
                f"tensor_parallel.apply found nothing to split in the {names}: register a factory for "
                "its classes by tensor_parallel.register, select layers by name, or lower smallest_bytes"
            )
        if self.sequence and not self.stacks:
            raise ModelError(
                f"tensor_parallel.apply was given sequence=True, but no stack of layers in the {names} is "
                f"{_missed(models)} leave it out"
            )
        with_parts = [module for model in models for module in model.modules() if placements_of(module)]
        for model in models:
            self._check_tied(model)
        for module in {id(module): module for module in (*self.split, *with_parts)}.values():
            inside(module)
        self._tell(models, names)

    def _tell(self, models: Sequence[nn.Module], names: str) -> None:
        """Say what was split, and warn of a model that was to be split and is whole on every rank for the most part."""
        if self.misfits and self.axis.rank == 0:
            logger.warning(
                f"axis {self.axis.name} splits each layer of {len(self.misfits)} blocks for itself, which gathers what "
                f"it gives: {self.misfits[0]}"
            )
        left = left_whole(models, self.to.cuts, self.smallest_bytes, self.leave)
        share = sum(left.values())
        said = f"axis {self.axis.name} splits {len(self.split)} modules of {names}"
        if share <= 0.5 or self.moves:  # as patterns say
            logger.info(said)
        elif self.axis.rank == 0:
            kinds = ", ".join(f"{kind} {part:.0%}" for kind, part in sorted(left.items(), key=lambda one: -one[1])[:3])
            logger.warning(
                f"{said}, but {share:.0%} of its parameters lie in large ones that stay whole on each of "
                f"{self.axis.size} ranks ({kinds}): register a factory for what has them by "
                "tulle.tensor_parallel.register, select layers by name, or use the ranks for another axis"
            )

    def _visit_children(self, module: nn.Module, name: str, move: str) -> None:
        stack = stack_of(module)
        layers = [*getattr(module, stack.layers)] if stack else []
        before = len(self.split)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # torch's fused inference path, which split layers do not have
        if stack and layers and self.sequence and move == AUTO:
            self._split_stack(module, name)
        elif stack:
            for number, layer in enumerate(layers):
                self.visit(layer, f"{_join(name, stack.layers)}.{number}", move)
        split = len(self.split) - before
        if stack and stack.is_one and 0 < split < len(layers):
            raise ModelError(
                f"{name} shares a table of position biases among its {len(layers)} layers, of which {split} "
                "were to be split: select all of them, or none"
            )
        self._split_together(module, name, move)
        for child_name, child in module.named_children():
            self.visit(child, _join(name, child_name), move)
        if isinstance(module, nn.TransformerEncoderLayer) and len(self.split) > before:  # a class derives from it
            module.activation_relu_or_gelu = 0  # torch's fused inference path reads the weights of what is in it

    def _split_together(self, module: nn.Module, name: str, move: str) -> None:
        """Split layers that follow each other in the forward of a module of a class that nobody knows."""
        names = {id(one): path for path, one in module.named_modules(prefix=name)}
        smallest_bytes = 0 if self.moves else self.smallest_bytes

        def is_wanted(group: Group) -> bool:
            paths = [names.get(id(layer), "") for layer in group.layers]
            is_said = all(self._move_within(path, name, move) == AUTO for path in paths)
            return (
                is_said
                and self.seen.isdisjoint(map(id, group.layers))
                and self.known.allows(group, module, smallest_bytes)
            )

        found = joined(module, self.axis.size, is_wanted)
        if found is not None:
            found.split(self.to, lambda one: names[id(one)])
            self.seen |= {*map(id, found.layers)}
            self.split += found.layers

    def _move_within(self, path: str, name: str, move: str) -> str:
        """What is done with a module in another, of which the name and what is done with it are given."""
        parts = path.removeprefix(name).strip(".").split(".")
        for count in range(len(parts)):
            inner = _join(name, ".".join(parts[: count + 1]))
            move = WHOLE if inner in self.leave else self._move(inner, move)
        return move

    def _split_stack(self, stack_module: nn.Module, name: str) -> None:
        """Split layers, between which activations are split along sequences."""
        stack = stack_of(stack_module)
        assert stack is not None, "the module was found to be a stack"
        layers = [*getattr(stack_module, stack.layers)]
        dim = stack.dim(stack_module)
        for number, layer in enumerate(layers):
            self._split_in_stack(layer, f"{_join(name, stack.layers)}.{number}", dim)
        last = layers[-1]
        for part in as_names(stack.final):
            if (found := getattr(stack_module, part, None)) is not None:
                last = found
                self.to.within(_join(name, part), sequence_dim=dim).norm(found)
                self.seen.add(id(found))
        sequences = Sequences(self.to.within(name, sequence_dim=dim).region)
        layers[0].register_forward_pre_hook(sequences.scatter_before, with_kwargs=True)
        last.register_forward_hook(sequences.gather_after)
        self.stacks.append(name)

    def _split_in_stack(self, layer: nn.Module, name: str, dim: int) -> None:
        factory = factory_of(layer)
        if factory is None:
            raise ModelError(
                f"{name} is a {type(layer).__name__}, for which no factory is registered, so sequences cannot be split "
                "across it: register one by tensor_parallel.register, or leave out sequence=True"
            )
        factory(layer, self.to.within(name, sequence_dim=dim))
        self.seen.add(id(layer))
        self.split.append(layer)

    def _draw_apart(self, module: nn.Module, name: str, layers: Mapping[str, str]) -> None:
        """Have ranks draw numbers of their own between the column and the row layers of one module."""
        columns, rows = (
            [module.get_submodule(own) for own, said in layers.items() if said == move] for move in ("column", "row")
        )
        draw_apart(module, columns, rows, self.to.within(name).region)

    def _by_hand(self, module: nn.Module, name: str, move: str) -> None:
        """What a pattern says of one layer."""
        to = self.to.within(name)
        if move in ("column", "row"):
            around, _, own = name.rpartition(".")
            self.by_hand.setdefault(around, {})[own] = move
        if move == "row" and isinstance(module, nn.Linear):
            to.row(module)
        elif move in ("column", "vocabulary") and isinstance(module, nn.Linear):
            to.column_alone(module, gather=False)
            if move == "vocabulary":
                self.split_scores.add(module)
        elif move == "vocabulary" and isinstance(module, nn.Embedding):
            to.vocabulary(module)
        else:
            raise ModelError(
                f'select says "{move}" for {name}, a {type(module).__name__}: "column" and "row" are for nn.Linear, '
                '"vocabulary" for nn.Linear and nn.Embedding'
            )

    def _move(self, name: str, inherited: str) -> str:
        move = inherited
        for pattern, said in self.moves.items():
            if name == pattern or fnmatchcase(name, pattern):
                self.matched.add(pattern)
                move = said
        return move

    def _is_small(self, module: nn.Module) -> bool:
        """Whether a layer is left whole, unless a pattern says otherwise."""
        if self.moves or any(id(own) in self.to.cuts for own in module.parameters()):
            return False  # what is tied to a part has the part's size, and is cut too
        return is_small(module, self.smallest_bytes, self.axis.size, self.known.held)

    def _check_tied(self, model: nn.Module) -> None:
        """Look at parameters that were cut where they have another name: a module that reads one there is refused."""
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                known = self.to.cuts.get(id(parameter))
                if known is None or name in placements_of(module):
                    continue
                if only_names(module, name):
                    place(module, name, known[1])
                else:
                    raise ModelError(
                        f"{_join(path, name)} is tied to a parameter that was split, but the {type(module).__name__} "
                        "stays whole: select both modules, or none, or untie them"
                    )


def is_small(module: nn.Module, smallest_bytes: int, ranks: int, unknown: Collection[int]) -> bool:
    """Whether a module is a layer that is not to be split over so many ranks without being asked."""
    if not is_alone(module):
        return is_bound_to_stay(module)
    if any(id(parameter) in unknown for parameter in module.parameters()):
        return True
    largest = max(module.parameters(), key=lambda parameter: parameter.nbytes)
    return largest.nbytes < smallest_bytes or largest.shape[0] < ranks


def moves_of(select: Select | None) -> Mapping[str, str]:
    """What a selection says of each pattern.

    Raises:
        ModelError: If it says what is no move.
    """
    if select is None:
        return {}
    moves = dict(select) if isinstance(select, Mapping) else dict.fromkeys(as_names(select), AUTO)
    for pattern, move in moves.items():
        if move not in MOVES:
            raise ModelError(f"select says {move!r} for {pattern!r}, expected one of {', '.join(MOVES)}")
    return moves


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _missed(models: Sequence[nn.Module]) -> str:
    """Of stacks that were to be split along sequences: whether there are any, and the mend."""
    stacks = [path for model in models for path, one in model.named_modules() if path and stack_of(one)]
    return f"selected: have select name {stacks[0]!r}, which is one, or" if stacks else "known:"
