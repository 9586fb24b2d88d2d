"""`Values`: moves values, gradients and outcomes between the ranks, for one program.

All ranks number what moves alike, because they run the same program: that number and the program's are the message's
key.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tulle.errors import ModelError
from tulle.parts import local_of
from tulle.pipeline.holdings import Holdings, Known
from tulle.pipeline.messages import Key, Kind
from tulle.pipeline.outcome import Described, Outcome, Raised
from tulle.pipeline.parted import whole_of
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.split_backward import Work
from tulle.pipeline.structure import Fixed, is_atom
from tulle.pipeline.tape import Phase, Tape, Walk

Wait = Callable[[Key, int, str], None]
"""Called with a key, the rank it comes from and what it is for; returns when it is there and this program's turn is."""


@dataclass(eq=False, slots=True)
class Result(Fixed):
    """A tensor that a program returned.

    Args:
        home: The rank that has it.
        described: What all ranks know of it.
        tensor: It, without a graph; None on other ranks until they are told.
    """

    home: int
    described: Described
    tensor: Tensor | None


class Later(Protocol):
    """Who does what can wait, in the thread of the program."""

    def put_off(self, works: Sequence[Work]) -> None:
        """Take it."""
        ...

    def catch_up(self) -> None:
        """Have all done that was put off; backward is over then."""
        ...


class Values:
    """What one program moves, and the tape of what its rank did.

    Args:
        number: Of the program.
        holdings: What lives where.
        wait: How to wait for a message.
        name: Of the program, for errors.
        later: Takes what of backward nobody waits for; None if all of it runs at once.
        walk: Of its tape; default one of its own.
    """

    def __init__(
        self,
        number: int,
        holdings: Holdings,
        wait: Wait,
        name: str,
        later: Later | None = None,
        *,
        walk: Walk | None = None,
    ) -> None:
        self._number, self.holdings, self._wait, self._later = number, holdings, wait, later
        self._mailbox, self._rank, self._size = holdings.mailbox, holdings.mailbox.axis.rank, holdings.mailbox.axis.size
        self._count, self._backwards = 0, 0
        self.tape = Tape(walk)
        self.name = name

    def rank_of(self, stage: int) -> int:
        """The rank on which a stage lives."""
        return stage % self._size

    def is_here(self, placeholder: Placeholder) -> bool:
        """Whether this rank is the owner."""
        return self.rank_of(placeholder.stage) == self._rank

    def bring(self, placeholder: Placeholder, rank: int, purpose: str) -> None:
        """Have a value at a rank: sent if it is not there yet. Every rank comes here."""
        placeholder.check_up_to_date(purpose)
        home = self.rank_of(placeholder.stage)
        if rank == home:
            return
        with_grad = placeholder.needs_grad and torch.is_grad_enabled()
        version, since = placeholder.sent.get(rank, (-1, None))
        call = self.tape.call
        if version == placeholder.family.version and (since == call or not with_grad):
            return
        placeholder.sent[rank] = placeholder.family.version, call if with_grad else None
        number = self._next()
        if self._rank == home:
            value = whole_of(self.native(placeholder), purpose)
            if with_grad:
                self.tape.send(number, rank, value, is_leaf=placeholder.is_parameter)
            self._mailbox.send((Kind.VALUE, self._number, number), value, to=(rank,))
        elif self._rank == rank:
            value = self._await((Kind.VALUE, self._number, number), home, f"an input of {purpose!r}")
            if with_grad:
                value = self.tape.receive(number, home, value, is_leaf=placeholder.is_parameter)
            placeholder.local = value
            placeholder.phase = self.tape.phase

    def native(self, placeholder: Placeholder) -> Tensor:
        """The tensor itself, as one of the phase that is being recorded."""
        value, phase = placeholder.local, placeholder.phase
        if value is None:
            raise ModelError(
                f"{placeholder!r} stands in an attribute of a module for what its forward left there, which is of "
                "another shape or kind this time: have the forward return it, or place the module's submodules instead"
            )
        if phase is self.tape.phase or phase is None or not torch.is_grad_enabled() or not value.requires_grad:
            return value
        assert isinstance(phase, Phase)
        if phase.is_over:  # its value is still good; a backward into it says that it is over
            return value
        cut = self.tape.cut(value, phase, is_leaf=placeholder.is_parameter)
        if phase.call == self.tape.call:  # else it is not to hold what later calls make of it
            placeholder.local, placeholder.phase = cut, self.tape.phase
        return cut

    def give_back(self, placeholder: Placeholder, rank: int, purpose: str) -> None:
        """Have what a rank wrote in its copy of a value be written at home, too. Every rank comes here."""
        home, number = self.rank_of(placeholder.stage), self._next()
        key = (Kind.VALUE, self._number, number)
        if self._rank == rank:
            self._mailbox.send(key, placeholder.local, to=(home,))
        elif self._rank == home:
            assert placeholder.local is not None, "it lives here"
            with torch.no_grad():
                placeholder.local.copy_(self._await(key, rank, f"what {purpose!r} wrote"))
        placeholder.sent = {rank: (placeholder.family.version, None)}

    def seed(self, loss: Placeholder, gradient: Tensor | None, scale: float) -> None:
        """Have backward begin at a loss. Every rank comes here."""
        rank = self.rank_of(loss.stage)
        if isinstance(gradient, Placeholder):
            self.bring(gradient, rank, "backward")
        if self._rank == rank:
            value = self.native(loss)
            given = gradient.local if isinstance(gradient, Placeholder) else gradient
            begin = torch.ones_like(value) if given is None else given.to(value.device)
            self.tape.phase.seeds.append((get_gradient_edge(value), begin * scale))

    def backward(self, phases: Sequence[Phase], *, retain_graph: bool) -> None:
        """Run backward through these of this rank's phases. Every rank comes here, with those of the same calls."""
        self.name = f"backward of {self.name}"
        self._backwards += 1
        later = None if retain_graph else self._later
        with torch.no_grad():
            put_off = None if later is None else later.put_off
            self.tape.backward(
                phases, self._gradient_of, self._give_gradient, retain_graph=retain_graph, put_off=put_off
            )
            if later is not None:
                later.catch_up()
        self.name = self.name.removeprefix("backward of ")

    def share(self, leaves: list[Any]) -> list[Any]:
        """The values of placeholders on all ranks, and what is none as it is. Every rank comes here."""
        kept = [(leaf, (Kind.VALUE, self._number, self._next())) for leaf in self.kept(leaves)]
        for leaf, key in kept:
            if isinstance(leaf, Result) and leaf.home == self._rank:
                self._tell_all(key, leaf.tensor)
        return [self._shared(leaf, key) for leaf, key in kept]

    def kept(self, leaves: list[Any]) -> list[Any]:
        """The same with a `Result` for each placeholder, of which all ranks are told later. Every rank comes here."""
        return [self._result(leaf) if isinstance(leaf, Placeholder) else leaf for leaf in leaves]

    def hear(self, name: str, rank: int, outcome: Outcome | None, known: Known | None) -> Outcome:
        """What the rank that runs an operation tells of its outcome, if it is not known.

        Args:
            name: Of the operation.
            rank: That runs it.
            outcome: What is known.
            known: Where an outcome that is the same whenever it comes is noted; None if there is none such.
        """
        if outcome is None and known is not None:
            message = Kind.OUTCOME, 0, _digest(known.signature)
            what = f"the outcome of {name!r}, whose arguments are to hold the same numbers and text on all ranks"
            self._wait(message, rank, f"{what} ({self.name})")
            if known.outcome is None:  # else another micro-batch has come by
                known.outcome = self._mailbox.look(message)
            outcome = known.outcome
        if outcome is None or outcome.varies:
            told = self._await((Kind.OUTCOME, self._number, self._next()), rank, f"the outcome of {name!r}")
            if isinstance(told, Raised):
                raise told.error
            return told
        return outcome

    def tell_error(self, error: Exception) -> bool:
        """Have the other ranks, which are to hear of an operation's outcome, raise what it raised, if that travels.

        Code between modules may catch it, and goes on alike then.
        """
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever its class makes of that
            return False
        self._tell_all((Kind.OUTCOME, self._number, self._next()), Raised(error))
        return True

    def tell(self, name: str, seen: Outcome, outcome: Outcome | None, known: Known | None) -> Outcome:
        """Tell the other ranks what they cannot know of an outcome; give what all go by."""
        if outcome is None and known is not None:
            if known.outcome is None:
                self._tell_outcome(name, (Kind.OUTCOME, 0, _digest(known.signature)), seen)
                known.outcome = seen
            outcome = known.outcome
        if outcome is None or outcome.varies:
            self._tell_outcome(name, (Kind.OUTCOME, self._number, self._count + 1), seen)
            self._next()  # not before: where it cannot be told, the error is the next message
            return seen
        if outcome is not seen and not seen.is_like(outcome):
            raise ModelError(
                f"{name!r} gave {seen.results} where {outcome.results} was expected of arguments of these shapes, so "
                "that the other stages cannot know what comes: its outcome depends on values; if it is a module, place "
                "its submodules instead, or give it as an argument what was set on it since (a flag)"
            )
        return outcome

    def end(self) -> None:
        """Forget the graph."""
        self.tape = Tape()

    def _gradient_of(self, number: int, rank: int) -> Tensor | None:
        return self._await(self._key_of_gradient(number), rank, "a gradient")

    def _give_gradient(self, number: int, rank: int, gradient: Tensor | None) -> None:
        self._mailbox.send(self._key_of_gradient(number), gradient, to=(rank,))

    def _key_of_gradient(self, number: int) -> Key:
        """Another one for each backward: with `retain_graph` several gradients of one value may be under way."""
        return Kind.GRADIENT, self._number, self._backwards << 32 | number

    def _tell_outcome(self, name: str, key: Key, outcome: Outcome) -> None:
        if self._size > 1 and any(hasattr(getattr(one, "value", None), "__next__") for one in outcome.results):
            raise ModelError(
                f"{name!r} gives an iterator, as what has yield in it does: the code would run behind the call, on one "
                "rank. Have it give a list (list(...)), or place the modules within it"
            )
        if self._size > 1 and any(isinstance(getattr(one, "value", None), nn.Module) for one in outcome.results):
            raise ModelError(
                f"{name!r} gives a module, or puts one into what it was given: other ranks would have a copy of it, "
                "whose parameters nobody trains; have it give tensors and numbers"
            )
        if self._size > 1 and any(map(_hides_graph, outcome.results)):
            raise ModelError(
                f"{name!r} gives a tensor that needs a gradient within something that is not taken apart (it has "
                "fields of C, or is of Python's own library or of torch), and gradients would not come back: have it "
                "give the tensor itself, or in a list, tuple, dictionary or object of a class of yours"
            )
        try:
            self._tell_all(key, outcome)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{name!r} gives something, or puts it into what it was given, that cannot be told to other ranks, "
                f"because {type(error).__name__}: {error}. Have it give tensors, numbers, text, and objects of classes "
                "and functions that stand at the top level of a file"
            ) from error

    def _tell_all(self, key: Key, content: object) -> None:
        self._mailbox.send(key, content, to=[rank for rank in range(self._size) if rank != self._rank])

    def _result(self, placeholder: Placeholder) -> Result:
        placeholder.check_up_to_date("the step")
        home, mine = self.rank_of(placeholder.stage), None
        if home == self._rank:
            assert placeholder.local is not None, "the owner has the value"
            with torch.no_grad():
                mine = local_of(whole_of(placeholder.local, "the step"))
        return Result(home, placeholder.described(), mine)

    def _shared(self, leaf: Any, key: Key) -> Any:
        if not isinstance(leaf, Result):
            return leaf
        return leaf.tensor if leaf.home == self._rank else self._await(key, leaf.home, "a result")

    def _await(self, key: Key, rank: int, purpose: str) -> Any:
        self._wait(key, rank, f"{purpose} ({self.name})")
        return self._mailbox.take(key)

    def _next(self) -> int:
        self._count += 1
        return self._count


class _Tensors(pickle.Pickler):
    """Finds out whether tensors that need a gradient are within something."""

    is_trained = False

    def persistent_id(self, obj: Any) -> object:
        """Look at what is to be written."""
        if not isinstance(obj, Tensor):
            return None
        self.is_trained |= obj.requires_grad
        return 0


def _hides_graph(result: object) -> bool:
    value = getattr(result, "value", None)
    if is_atom(value) or isinstance(value, type):
        return False
    pickler = _Tensors(io.BytesIO())
    with suppress(pickle.PicklingError, TypeError, AttributeError):  # which is told where it is sent
        pickler.dump(value)
    return pickler.is_trained


_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
"""Of a function or an object, by which a dictionary may have its values; it differs between ranks."""


def _digest(key: Hashable) -> int:
    said = _ADDRESS.sub("", repr(key))
    return int.from_bytes(blake2b(said.encode(), digest_size=7).digest(), "little")
