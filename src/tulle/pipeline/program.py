"""`Program`: one micro-batch's run of the user's code, which every rank runs, while each operation runs on one of them.

The rules, for one operation with tensors of several stages among its arguments:

    a placed module        runs at its stage
    any other operation    runs at the latest stage among its arguments, or where the tensor lives that it writes in
    an argument that lives on another rank is sent there, once, without waiting
    the result             is known everywhere by shape (`Shapes`, or told by the rank that ran it), and by value there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tulle.errors import ModelError
from tulle.pipeline.adopted import Adopted, with_lender
from tulle.pipeline.counted import counted
from tulle.pipeline.execution import Execution
from tulle.pipeline.graphs import Graphs
from tulle.pipeline.held import Settled
from tulle.pipeline.holdings import Holdings, Known, Unit
from tulle.pipeline.hooks import with_hooks
from tulle.pipeline.in_place import MARKS, mark, note_marked, note_written
from tulle.pipeline.inside import Inside, at_work
from tulle.pipeline.interception import interception_aside
from tulle.pipeline.leaves import check_backward_of_all
from tulle.pipeline.losses import is_backward, scaled
from tulle.pipeline.messages import is_dense
from tulle.pipeline.objects import Wanted, holds_objects, mapped
from tulle.pipeline.operation import (
    SETS_DATA,
    SETS_TRAINED,
    Call,
    check_asks,
    check_backward,
    check_given,
    check_nested,
    check_sends,
    check_transform,
    dealt_out,
    is_for_all,
    set_data,
)
from tulle.pipeline.outcome import Constant, Described, Outcome, Same, Twin
from tulle.pipeline.parted import UNTOLD, told_of_shape
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.recompute import outside_of_checkpoint
from tulle.pipeline.sending import is_collective
from tulle.pipeline.shapes import writes_in_many
from tulle.pipeline.structure import flatten, flatten_call, rebuild
from tulle.pipeline.tape import Graph
from tulle.pipeline.unit_call import UnitCall
from tulle.pipeline.values import Values

Read = Callable[[Placeholder, int], None]
"""Called with a placeholder, and the stage at which an operation reads it."""


class Program:
    """One micro-batch's run.

    Args:
        values: Moves them.
        holdings: What lives where.
        seed: Of its random numbers.
        around_backward: Entered when backward is about to begin, left when it is over.
        scale: What gradients are multiplied with.
        read: Told of each placeholder that an operation reads, if anybody wants to know.
        fail: Told of an error in an operation or a module; within steps all that fails is told in another way.
    """

    def __init__(
        self,
        values: Values,
        holdings: Holdings,
        *,
        seed: int,
        around_backward: Callable[[], Any] = nullcontext,
        scale: float = 1.0,
        read: Read | None = None,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.values, self.holdings, self.seed, self.scale = values, holdings, seed, scale
        self.stage = 0
        """The last that this rank was at."""
        self._stages: set[int] = set()
        self.has_graph = False
        """Whether a backward could come; the same on all ranks."""
        self._axis = holdings.mailbox.axis
        self._around_backward, self._read = around_backward, read
        self._calls: dict[str, int] = {}
        """How often each module and operation was called so far, by name; "" is the model."""
        self.adopted, self._fail = Adopted(holdings, self), fail
        self.models = self.adopted.models
        """Numbers of the models that it called modules of, or read parameters of; the same on all ranks."""
        self.leaves: dict[int, Tensor] = {}
        """The user's own tensors that need a gradient and that stages read, by identity; the same on all ranks."""
        self._graphs = Graphs(values.tape)
        self._held: dict[int, tuple[Any, Settled]] = {}
        """What objects were seen to hold in the call of the model at hand."""
        self._inside = Inside(values, self._need)
        self._execution = Execution(values, holdings, self._inside, seed=seed, is_by_stage=read is not None)
        self._has_left = False
        """Whether it wrote in a parameter or buffer, set an attribute, or drew from a generator of the user's own."""
        self.is_over = False
        """Whether it has come to its end; what it made may be read still."""
        self._is_applying = False
        """Whether `apply` runs; a placed module that is called then, with nothing inside, is to tell its shapes."""

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation between modules. Every rank comes here."""
        inside = self._inside if self._inside.name is not None else at_work.get()  # autograd has threads of its own
        if inside is not None:
            return inside.operate(function, args, kwargs)
        if is_for_all(function, args):
            return self._do_on_all(function, args, kwargs)
        leaves, spec = flatten_call(args, kwargs)
        leaves = [self.adopted.placed(leaf) for leaf in leaves]
        if (told := told_of_shape(function, args, leaves)) is not UNTOLD:
            return told
        call = Call(counted(function), leaves, spec, getattr(function, "__name__", str(function)))
        return self._operate(call, function, args, kwargs)

    def _operate(self, call: Call, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placeholders = call.placeholders
        if self._axis.size > 1:
            check_asks(function, args, placeholders)
        if not placeholders:
            # whoever draws first has other numbers, and collectives of micro-batches are to meet their own
            self._has_left |= kwargs.get("generator") is not None or is_collective(function)
            if self.leaves and is_backward(function):
                check_backward_of_all(args[0], self.leaves)
            with outside_of_checkpoint():
                result = scaled(function, args, kwargs, self.scale)
            return with_lender(function, args, result)
        if self._axis.size > 1:
            if function == SETS_DATA:
                return set_data(self.operate, *args, is_placed=isinstance(call.leaves[0], Placeholder))
            self._note_leaves(check_given(call, self.holdings))
            check_sends(function, args, kwargs, self._axis)
            if writes_in_many(function) and len(dealt := dealt_out(args, kwargs, self.adopted.stage_of)) > 1:
                for part, named in dealt:
                    self.operate(function, part, named)
                return args[0]
        outcome = self.holdings.shapes.outcome(call.function, call.leaves, call.spec)
        result = self._run(call, self._stage_of(call, outcome), outcome, self.count_call(call.name))
        if call.name in MARKS:
            mark(call.leaves[0], needs_grad=call.name == "requires_grad_" and call.leaves[1:] != [False])
        return result

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that torch shows to no mode, so that ours still watches. Every rank comes here."""
        self._is_applying = True
        try:
            with interception_aside():
                return self.operate(function, args, kwargs)
        finally:
            self._is_applying = False

    def call_unit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a placed module. Every rank comes here."""
        if self._inside.name is not None:  # one unit calls another directly: they run as one
            if self.values.rank_of(unit.stage) != self._axis.rank:
                raise ModelError(
                    f"module {unit.name!r} of stage {unit.stage} is called from within {self._inside.name!r}, which "
                    "runs at another stage as a whole: place both at one"
                )
            return unit.module._call_impl(*args, **kwargs)
        if self._is_applying:  # shapes are being found out, on all ranks: whoever has the module will tell
            raise ModelError(f"what calls the placed module {unit.name!r} gives cannot be told by its shapes")
        if self._axis.size > 1:
            check_transform(unit.name)
        self.models.add(unit.model)
        module, run = unit.module, unit.compiled or unit.module._call_impl
        if not (module._forward_pre_hooks or module._forward_hooks):
            return self._call(unit, run, args, kwargs)
        return with_hooks(unit.name, module, run, partial(self._call, unit), (args, kwargs))

    def _call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with interception_aside():
            call = UnitCall(unit, run, args, kwargs, self.adopted.placed, self._held)
            check_nested(unit.name, call.leaves)
            if self._axis.size > 1:
                self._note_leaves(check_given(call, self.holdings))
            known = self.holdings.of_call(unit, call.leaves, call.spec, call.about, is_in_step=self._fail is None)
            number = self.count_call(unit.name)
            while True:
                result = call.wanted(known.outcome) or self._run(call, unit.stage, known.outcome, number, known)
                if not isinstance(result, Wanted) or call.given is None:
                    return call.finish(result)
                call.given.brought.update(dict.fromkeys(result.leaves))
                known = self.holdings.after(known, result)

    def backward(
        self,
        losses: Sequence[Any],
        gradients: Tensor | Sequence[Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """Run backward from losses, as `torch.autograd.backward`. Every rank comes here."""
        self._inside.check_goes_on()
        if self.is_over:
            raise ModelError(
                "backward was called on a loss of a step that is over: call loss.backward() within the step"
            )
        given = [gradients] if isinstance(gradients, Tensor) else gradients or [None] * len(losses)
        check_backward(losses, given, options)
        for loss, gradient in zip(losses, given, strict=True):
            for one in (loss, gradient):
                if isinstance(one, Placeholder):
                    self._need(one)
            self.values.seed(loss, gradient, self.scale)
        self.has_graph = bool(options.get("retain_graph"))
        with self._around_backward():
            self._inside.begin("backward")  # what it recomputes runs where it ran, on that rank alone
            try:
                self.values.backward(self._graphs.now.needed_phases(), retain_graph=self.has_graph)
            finally:
                self._inside.end()

    def cut_off(self) -> None:
        """Outside of steps: what follows is apart from what was, which goes when nobody has anything of it any more."""
        self._graphs.cut_off()

    def count_call(self, name: str = "") -> int:
        """The number of this call among those of a module or operation, or of the model; all ranks count alike."""
        self._inside.check_goes_on()
        self._calls[name] = self._calls.get(name, 0) + 1
        return self._calls[name]

    def visible(self, value: Any) -> Any:
        """What the model gives, with placeholders for what has come to live on one rank."""
        self._held.clear()
        return mapped(value, lambda leaves: list(map(self.adopted.placed, leaves))) if self.adopted else value

    def give(self, value: object) -> Any:
        """A value of which all ranks are told at the end of the step, by `results.told_to_all`. Every rank comes here.

        What objects hold they are told at once: other micro-batches may be given the same ones.
        """
        self._inside.check_goes_on()
        leaves, spec = flatten(value)
        if holds_objects(leaves):
            return mapped(value, lambda leaves: self.values.share(list(map(self.adopted.placed, leaves))))
        return rebuild(spec, self.values.kept(list(map(self.adopted.placed, leaves))))

    def end(self) -> None:
        """Forget the graph."""
        self.is_over = True
        self._held.clear()
        self.values.end()
        self.adopted.clear()
        if not self.has_graph:
            self._graphs.clear()
        self._graphs.end()

    @property
    def held(self) -> int:
        """How many of this rank's stages have run forward, and not yet backward."""
        left = self.values.tape.left
        return len(self._stages) if left is None else min(left, len(self._stages))

    @property
    def stage_in_backward(self) -> int:
        """The last of this rank's stages that has not run backward."""
        return sorted(self._stages)[self.held - 1] if self._stages else 0

    @property
    def is_kept(self) -> bool:
        """Whether anybody may read a value of it in another program: a model, a module, or a hook of the user's."""
        return self._has_left or self._graphs.is_kept

    @property
    def graph(self) -> Graph:
        """Of the call of the model at hand: what is made now keeps it."""
        return self._graphs.now

    @property
    def is_between_modules(self) -> bool:
        """Whether what runs now is the user's code, which all ranks run."""
        return self._inside.name is None

    def _run(self, call: Call, stage: int, outcome: Outcome | None, number: int, known: Known | None = None) -> Any:
        rank = self.values.rank_of(stage)
        for placeholder in call.placeholders:
            if self._read is not None:
                self._read(placeholder, stage)
            if torch.is_grad_enabled():
                self._need(placeholder)
            self.values.bring(placeholder, rank, call.name)
            if known is None and self.values.rank_of(placeholder.stage) != rank and not is_dense(placeholder):
                outcome = None  # it comes with other strides than it has at home: who runs the operation tells of it
        if rank != self._axis.rank:
            outcome = self.values.hear(call.name, rank, outcome, known)
            return self._wrapped(call, stage, outcome, [None] * len(outcome.results))
        self.stage = stage
        self._stages.add(stage)
        try:
            seen, values = self._execution.run(call, stage, outcome, number, known)
            told = self.values.tell(call.name, seen, outcome, known)
        except Exception as error:
            what = f"module {call.name!r}" if call.unit else f"operation {call.name!r}"
            error.add_note(f"in {what}, {self.values.name}, on rank {self._axis.rank} of axis {self._axis.name!r}")
            if known is not None or outcome is not None or not self.values.tell_error(error):
                (self._fail or partial(self._inside.note_raised, call))(error)
            raise
        return self._wrapped(call, stage, told, values)

    def _need(self, placeholder: Placeholder) -> bool:
        """Note that gradients go back to an earlier call, if they do; whether that is news. Every rank comes here."""
        return placeholder.program is self and self._graphs.need(placeholder)

    def _note_leaves(self, found: Sequence[Tensor]) -> None:
        for leaf in found:
            self.leaves[id(leaf)] = leaf

    def _take(self, leaf: Any) -> None:
        """Note that what a placeholder stands for comes from the call at hand, if gradients go back to it."""
        if isinstance(leaf, Placeholder) and leaf.program is self:
            self._graphs.take(leaf)

    def _wrapped(self, call: Call, stage: int, outcome: Outcome, values: Sequence[Any]) -> Any:
        """What the program gets to see of a result."""
        if (only := outcome.only) is not None:
            return self._stand_for(only, stage, values[0], None)
        for number in outcome.written:
            self._note_written(call, number, stage, is_trained=number in outcome.trained)
        note_marked(call, outcome)
        results: list[Any] = []
        for result, value in zip(outcome.results, values, strict=True):
            if isinstance(result, Same):
                results.append(call.leaves[result.argument])
                self._take(results[-1])
            elif isinstance(result, Twin):
                results.append(results[result.result])
            elif isinstance(result, Constant):
                results.append(result.value)
            else:
                base = None if result.base is None else call.leaves[result.base]
                base = base if result.kin is None else results[result.kin]
                is_view = isinstance(base, Placeholder) and (base.stage - stage) % self._axis.size == 0
                results.append(made := self._stand_for(result, stage, value, base if is_view else None))
                if isinstance(base, Placeholder) and not is_view:
                    base.family.lend(base, made.family, self.values.rank_of(stage))
        self._has_left |= bool(outcome.left)
        for left in outcome.left:
            assert call.unit is not None, "operations have no attributes"
            stand_for = lambda result, value: self._stand_for(result, stage, value, None)  # noqa: E731
            call.unit.attributes.show(left, results, stand_for, is_here=self.values.rank_of(stage) == self._axis.rank)
        return rebuild(outcome.spec, results)

    def _note_written(self, call: Call, number: int, stage: int, *, is_trained: bool) -> None:
        leaf = call.leaves[number]  # it may be one that all ranks had alike until now
        if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder):
            leaf = call.leaves[number] = self.adopted.adopt(leaf, stage, self.values.tape.phase, is_trained=is_trained)
        self._has_left |= note_written(call, number, stage, is_trained=is_trained, values=self.values, take=self._take)
        if isinstance(leaf, Placeholder) and leaf.own is not None:
            self.holdings.keep(leaf.own, leaf.stage, is_trained=leaf.needs_grad)

    def _stand_for(
        self, described: Described, stage: int, value: Tensor | None, base: Placeholder | None
    ) -> Placeholder:
        made = Placeholder(described, stage, self, self._axis.device)
        made.local, made.phase = value, self.values.tape.phase
        self.has_graph |= described.needs_grad
        if base is not None:
            made.share_memory_with(base)
        return made

    def _do_on_all(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do on all ranks what all do alike."""
        if function in SETS_TRAINED:
            self.holdings.modes.vary()
        result = function(*args, **kwargs)
        if function in SETS_TRAINED:
            self.adopted.forget(args[0])
            self.holdings.note_frozen()
        return result

    def _stage_of(self, call: Call, outcome: Outcome | None) -> int:
        """Where an operation runs."""
        stage = max(placeholder.stage for placeholder in call.placeholders)
        if (target := call.written(outcome)) is None:
            return stage
        if not isinstance(call.leaves[target], Placeholder):
            call.leaves[target] = self.adopted.adopt(call.leaves[target], stage, self.values.tape.phase)
        return call.leaves[target].stage
