"""`Holdings`: what lives where on an axis, shared by all programs that run on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tulle.pipeline.kept import Attributes
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.modes import Mode, Modes
from tulle.pipeline.outcome import Outcome
from tulle.pipeline.randomness import seed_of
from tulle.pipeline.shapes import Shapes, signature
from tulle.pipeline.structure import LEAF, Spec, is_atom
from tulle.pipeline.tape import Walk

_MOST_CALLS = 32768
"""So many calls are remembered, of 1.5 kB each and more."""
_TOLD_EACH_TIME = Outcome((), LEAF, varies=True)


@dataclass(slots=True, eq=False)
class Unit:
    """A module that runs on one rank as a whole.

    Args:
        name: The module's, in its model.
        module: The module.
        stage: Where it lives.
        model: Number of the model among those that were placed on the axis.
        compiled: What `module.compile()` has made of its call, if it was called.
        attributes: In which its forward leaves something.
    """

    name: str
    module: nn.Module
    stage: int
    model: int = 0
    compiled: Callable[..., Any] | None = None
    attributes: Attributes = field(init=False)
    within: list[tuple[str, nn.Module]] = field(init=False)
    """The modules in it, by their names in the model."""
    salt: int = field(init=False)
    """Stands for its name where seeds are made."""
    recent: Recent | None = None
    """Its last call."""
    _handles: int = -1
    """How many hooks this process had registered when those on modules in it were looked for."""
    _has_inner_hooks: bool = False

    def __post_init__(self) -> None:
        """Nothing is left in its attributes yet."""
        self.attributes = Attributes(self.module)
        self.salt = seed_of(self.name)
        self.within = list(self.module.named_modules(prefix=self.name))[1:]

    @property
    def has_inner_hooks(self) -> bool:
        """Whether there are hooks on modules in it, or were when the last hook of this process was registered."""
        if self._handles != RemovableHandle.next_id:
            self._handles = RemovableHandle.next_id
            self._has_inner_hooks = any(one._forward_hooks or one._forward_pre_hooks for _, one in self.within)
        return self._has_inner_hooks


@dataclass(slots=True, eq=False)
class Known:
    """What is known of calls of a unit with arguments of the same shapes.

    Args:
        signature: All that their outcome can depend on.
        outcome: Their outcome, once one has run.
        draws: Whether one was seen to draw from Python's or numpy's generator, on the rank where they run.
    """

    signature: Hashable
    outcome: Outcome | None = None
    draws: bool | None = None


class Recent(NamedTuple):
    """A call of a unit within a step, and what is known of such: most are as the one before.

    Args:
        found: How it found all modules; of one step.
        about: All else that its outcome could depend on.
        known: Of such calls.
    """

    found: Mode
    about: Hashable
    known: Known


@dataclass(slots=True)
class Holdings:
    """What lives where.

    Args:
        mailbox: Messages between the ranks.
    """

    mailbox: Mailbox
    stages: dict[int, int] = field(default_factory=dict)
    """Stage of each parameter, and of each buffer of a unit, by its identity."""
    models: dict[int, int] = field(default_factory=dict)
    """Number of the model of each of these."""
    buffers: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Buffers that live on all ranks, because they are in no unit: their models' numbers and their names."""
    copied: dict[int, str] = field(default_factory=dict)
    """Names of what modules of several ranks hold, by identity."""
    settled: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Those that did, until something was written there that one rank has: they live there now."""
    changed: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Those of these in which something was written since all ranks held the same; all ranks know the same ones."""
    written: set[int] = field(default_factory=set)
    """Tensors of the user's own that are in `stages`, by identity."""
    shapes: Shapes = field(default_factory=Shapes)
    calls: dict[Hashable, Known] = field(default_factory=dict)
    """Of calls of units, by signature; all ranks know the same ones, as who runs one tells its outcome once."""
    is_full: bool = False
    """Whether any rank knew too many at the end of the last step; all ranks say the same."""
    frozen: dict[int, int] = field(default_factory=dict)
    """Stands for which parameters of a model need a gradient, by the model's number."""
    note_frozen: Callable[[], None] = lambda: None
    """Finds that out anew."""
    modes: Modes = field(init=False)
    """What programs of a step set on modules for a while."""
    walk: Walk = field(default_factory=Walk)
    """Of all programs outside of steps."""
    met: dict[tuple[int, str, int], weakref.ref[Any]] = field(default_factory=dict)
    """Objects that units were given outside of steps, by model, unit and identity."""

    def __post_init__(self) -> None:
        """No step has begun."""
        self.modes = Modes(lambda: self.note_frozen())

    def _mode_of(self, unit: Unit) -> Hashable:
        """All that the outcome of a unit's call can depend on besides its arguments."""
        training = unit.module.training, *[one.training for _, one in unit.within]
        return unit.model, unit.name, training, self.frozen.get(unit.model)

    def of_call(
        self, unit: Unit, leaves: Sequence[Any], spec: Spec, objects: Hashable = None, *, is_in_step: bool
    ) -> Known:
        """What is known of calls of a unit with such arguments, and with such objects among them.

        Of words that are generated one after the other nothing is, if a unit is given an object (a cache of keys and
        values), or one again that is not taken apart, which an earlier call may have filled: all is told at each call.
        """
        found, recent = self.modes.look(unit.module), unit.recent
        about = signature((objects, _twins(leaves)), leaves, spec)
        if found is not None and recent is not None and recent.found is found and recent.about == about:
            return recent.known
        mode = self._mode_of(unit)
        if not (is_in_step or torch.is_grad_enabled()) and (objects is not None or self._is_met(unit, leaves)):
            return replace(self.known(mode), outcome=_TOLD_EACH_TIME)
        known = self.known((mode, about))
        unit.recent = None if found is None else Recent(found, about, known)
        return known

    def after(self, known: Known, what: Hashable) -> Known:
        """What is known of calls once something has come to the unit that it wanted."""
        return known if known.outcome is _TOLD_EACH_TIME else self.known((known.signature, what))

    def _is_met(self, unit: Unit, leaves: Sequence[Any]) -> bool:
        found = False
        for leaf in leaves:
            if not is_atom(leaf) and type(leaf).__weakrefoffset__:
                key = unit.model, unit.name, id(leaf)
                met = self.met.get(key)
                found |= met is not None and met() is leaf
                self.met[key] = weakref.ref(leaf, partial(self._part_from, key))
        return found

    def _part_from(self, key: tuple[int, str, int], gone: object) -> None:
        if self.met.get(key) is gone:
            del self.met[key]

    def known(self, signature: Hashable) -> Known:
        """What is known of calls with that signature."""
        known = self.calls.get(signature)
        if known is None:
            known = self.calls[signature] = Known(signature)
        return known

    def forget_calls(self) -> None:
        """Forget all calls, if there were too many: batches of ever other lengths would fill the memory.

        Every rank must call it at the end of a step, before it tells the others of that.
        """
        if self.is_full:
            self.calls.clear()
            self.mailbox.forget_outcomes()

    def count_calls(self, most: int) -> None:
        """Note how many calls that rank knows which knows most; all ranks forget them at the end of the next step."""
        self.is_full = most > _MOST_CALLS

    def note(self, tensor: Tensor, stage: int | None, model: int, name: str) -> None:
        """Note that a parameter or buffer of a model lives at a stage, or, if None, on all ranks; until it is gone."""
        if stage is not None:
            self.stages[id(tensor)], self.models[id(tensor)] = stage, model
            weakref.finalize(tensor, self.stages.pop, id(tensor), None)
            weakref.finalize(tensor, self.models.pop, id(tensor), None)
        else:
            self.buffers[id(tensor)] = model, name
            weakref.finalize(tensor, self.buffers.pop, id(tensor), None)

    def note_copied(self, tensor: Tensor, name: str) -> None:
        """Note that modules of several ranks hold a tensor, a copy each; until it is gone."""
        self.copied[id(tensor)] = name
        weakref.finalize(tensor, self.copied.pop, id(tensor), None)

    def settle(self, tensor: Tensor, stage: int) -> None:
        """Note that a tensor lives at a stage from now on, if it is a buffer that lived on all ranks."""
        known = self.buffers.pop(id(tensor), None)
        if known is not None:
            self.note(tensor, stage, *known)
            self.settled[id(tensor)] = known
            weakref.finalize(tensor, self.settled.pop, id(tensor), None)

    def note_changed(self, tensor: Tensor) -> None:
        """Note that something was written in a tensor, if it is such a buffer. Every rank must call it."""
        if (known := self.settled.get(id(tensor))) is not None:
            self.changed[known] = tensor

    def keep(self, tensor: Tensor, stage: int, *, is_trained: bool) -> None:
        """Note where a tensor of the user's own lives, in which a stage has written, for programs that come later.

        Args:
            tensor: This rank's.
            stage: Where it lives.
            is_trained: Whether it has become a part of a graph, which goes with this program.
        """
        if is_trained:
            self._lose(id(tensor))
        elif id(tensor) not in self.stages and tensor._base is None:
            self.stages[id(tensor)] = stage
            self.written.add(id(tensor))
            weakref.finalize(tensor, self._lose, id(tensor))

    def _lose(self, identity: int) -> None:
        if identity in self.written:
            self.written.discard(identity)
            self.stages.pop(identity, None)

    def replace(self, tensor: Tensor, model: int, name: str) -> None:
        """Note that a buffer which lived on all ranks does so again, as another tensor than before."""
        self.changed.pop((model, name), None)
        self.note(tensor, None, model, name)


def _twins(leaves: Sequence[Any]) -> tuple[int, ...] | None:
    """Which tensors among a call's arguments are the same, if some are."""
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    is_any = len(tensors) > 1 and len(set(tensors)) < len(tensors)
    return tuple(map(tensors.index, tensors)) if is_any else None
