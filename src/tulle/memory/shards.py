"""`OptimizerShards`: each rank of an axis steps its part of every parameter, and all gather what the others stepped.

The optimizer keeps state for its part only: 1/n of Adam's two moments. Parts are views of the parameters, so nothing is
held twice; with `narrow`, parameters are kept in 16 bits, and the parts are their masters in full precision.

Source: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), section 5.1
(optimizer state partitioning); Micikevicius et al., *Mixed Precision Training* (2018), section 3.1 (master weights).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from tulle.comm import all_gather_parts, eager, follow_steps, gather_values, monitored_barrier
from tulle.errors import CommunicationError, GradientError, ModelError
from tulle.memory.given_states import give_whole_states
from tulle.memory.piece_states import PieceStates
from tulle.memory.pieces import Bucket, Piece, deal, flat, laid_out_like, lay_out
from tulle.mesh import Axis
from tulle.step_hooks import Arguments, hook_failed, hook_first_after, hook_last
from tulle.tables import called_first, split_of
from tulle.traits import SHARDABLE, is_shardable

LABEL = "stepped parameters"
STATE_LABEL = "optimizer state"
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""Entries of an optimizer's state that are one number for a whole parameter."""
_MEND = (
    "of an optimizer whose state is sharded over the ranks each has a part, so every rank of the axis must call it. "
    "Take it in front of `if rank == 0:`, within which it is saved, or tulle.save(path, model, optimizer)"
)
_MASTER = "master"
"""The name under which an optimizer's state has the masters."""


@dataclass(slots=True, eq=False)
class OptimizerShards:
    """The run-time of one optimizer whose state is sharded; `shard_optimizer` makes it.

    Args:
        optimizer: Whose parameters are replicas on the ranks of the axis.
        axis: Whose ranks share the work.
        narrow: In which parameters are kept, their masters staying in their own dtype; None to leave them.
        leave: Identities of parameters that every rank steps as they are, and keeps the state of.
    """

    optimizer: Optimizer
    axis: Axis
    narrow: torch.dtype | None
    leave: Collection[int] = ()
    buckets: list[Bucket] = field(init=False)
    _owned: dict[nn.Parameter, Piece | None] = field(init=False)
    """By parameter, this rank's piece of it, or None; what is frozen is not cut, until it is trained."""
    _wide: dict[nn.Parameter, torch.dtype] = field(init=False)
    """By parameter that was narrowed, what its master is in."""
    _whole: list[list[nn.Parameter]] | None = field(init=False, default=None)
    """The groups' own parameters, while their pieces stand in for them."""

    def __post_init__(self) -> None:
        self.buckets, self._owned, self._wide = [], {}, {}
        self._deal_out([p for p in self._here() if p.requires_grad or p in self.optimizer.state])
        if self.narrow:
            for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
                if parameter.is_floating_point() and not self.is_apart(parameter):
                    self._wide[parameter] = parameter.dtype
                    parameter.data = parameter.data.to(self.narrow)

    def is_apart(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer steps a parameter as it is: of a table that is split a rank has a part anyway."""
        return id(parameter) in self.leave or split_of(parameter) is not None

    def _here(self) -> list[nn.Parameter]:
        """The parameters to cut of which it trains some; those on device meta live at other stages of a pipeline."""
        groups = self._whole or [group["params"] for group in self.optimizer.param_groups]
        numbers = (p for group in groups for p in group if p.is_floating_point() or p.is_complex())
        return [p for p in numbers if not p.is_meta and not self.is_apart(p)]

    def _deal_out(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cut parameters into pieces, alike on all ranks of the axis."""
        for parameter in parameters:
            if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                raise ModelError(
                    f"a parameter of shape {list(parameter.shape)} and strides {list(parameter.stride())} has gaps in "
                    "memory, so it cannot be cut into pieces: make it contiguous"
                )
        buckets = [deal(bucket, self.axis.size) for bucket in lay_out(parameters)]
        self.buckets += buckets
        self._owned |= dict.fromkeys(parameters)
        for bucket in buckets:
            for piece in bucket.pieces[self.axis.rank]:
                self._owned[piece.parameter] = piece
                values = flat(piece.parameter.data)[piece.start : piece.stop]
                wide = self._wide.get(piece.parameter, values.dtype)
                piece.tensor = nn.Parameter(values.to(wide, copy=True) if self.narrow else values)

    def _deal_out_added(self, remembered: Collection[Any] = ()) -> None:
        """Cut what was added since, or is trained now, or is among parameters that a state remembers.

        Raises:
            ModelError: If that cannot be cut any more.
        """
        added = [p for p in self._here() if p not in self._owned and (p.requires_grad or p in remembered)]
        for parameter in added:
            if self.narrow and parameter not in self._wide:
                raise ModelError(
                    f"a parameter of shape {list(parameter.shape)} was added to an optimizer after its state was "
                    "sharded, which has a master in full precision: add it before, or give it an optimizer of its own"
                )
        self._deal_out(added)

    @eager
    def before_step(
        self, _optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Arguments | None:
        """Have the optimizer see this rank's pieces and their gradients instead of the parameters.

        A hook of torch's: gets the arguments of `step`, the optimizer among them, and gives others if they hold a
        closure, which is called here.
        """
        called = called_first(arguments, keywords)
        self._deal_out_added()
        self._guard_state()
        self._follow_parameters()
        groups = self.optimizer.param_groups
        stepped = [[piece for p in group["params"] if (piece := self._stepped(p)) is not None] for group in groups]
        self._whole = [group["params"] for group in groups]
        for group, pieces in zip(groups, stepped, strict=True):
            group["params"] = pieces
        return called

    @eager
    def after_step(self, *_: object) -> None:
        """Put the parameters back, and gather what the other ranks stepped. Every rank of the axis must call it.

        Raises:
            GradientError: If the step has failed on another rank.
        """
        self._put_back()
        increment_version([p for p in self._here() if p.grad is not None])  # what has a graph of them is old
        if failed := self._share(has_failed=False):
            raise GradientError(
                f"the step of {type(self.optimizer).__name__} failed on rank {failed[0]} of axis {self.axis.name!r}, "
                "whose own error says why: what it steps of the parameters, for all ranks, is not updated, or in part. "
                "They are alike on all ranks: start anew from a checkpoint, or call zero_grad() and go on"
            )

    def give_up(self) -> None:
        """After a step that failed put the parameters back, for who zeroes their gradients, or saves.

        What was stepped by then all ranks have, so that they stay alike; one that has not failed waits for it.
        """
        if self._whole is not None:
            self._put_back()
            error = sys.exception()
            if isinstance(error, Exception) and not isinstance(error, CommunicationError):  # an interrupt ends all
                with suppress(CommunicationError):
                    self._share(has_failed=True)

    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state as one process would have it, by parameter. Every rank of the axis must call it.

        Raises:
            CommunicationError: If others do not, which is noticed when they take another step or leave.
        """
        if self.axis.size > 1:
            monitored_barrier(self.axis, "optimizer.state_dict()", _MEND)
        self._deal_out_added()
        self._follow_parameters()
        apart = [p for group in self.optimizer.param_groups for p in group["params"] if self.is_apart(p)]
        whole = {p: dict(kept) for p in apart if (kept := self.optimizer.state.get(p)) is not None}
        for bucket in self.buckets:
            pieces = bucket.pieces[self.axis.rank]
            own = [self._state_of(piece) for piece in pieces]
            kinds = [_kinds(state, piece) for state, piece in zip(own, pieces, strict=True)]
            heard = gather_values(kinds, self.axis, label=STATE_LABEL)
            for name in sorted({name for states in heard for state in states for name in state}):
                self._gather_state(bucket, name, own, heard, whole)
        return whole

    def take_parts(self, whole: Mapping[Any, Any]) -> None:
        """Of whole states by parameter, keep this rank's parts; what is kept by a name is of none, and stays whole."""
        self._deal_out_added(whole)
        self._guard_state()
        self.optimizer.state.clear()
        self.optimizer.state.update({key: kept for key, kept in whole.items() if not isinstance(key, Tensor)})
        for parameter, state in whole.items():
            if isinstance(parameter, nn.Parameter) and self.is_apart(parameter):
                self.optimizer.state[parameter] = state
            if (piece := self._owned.get(parameter)) is None or piece.tensor is None:
                continue
            parts = {name: _part(name, value, piece) for name, value in state.items()}
            if (master := parts.pop(_MASTER, None)) is not None and self.narrow:
                piece.tensor.data.copy_(master)
            if parts:
                self.optimizer.state[piece.tensor] = parts

    def refresh_masters(self) -> None:
        """Have masters follow the parameters, which were loaded."""
        for piece in self._owned.values():
            if self.narrow and piece is not None and piece.tensor is not None:
                piece.tensor.data.copy_(flat(piece.parameter.data)[piece.start : piece.stop])

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Have masters be what parameters are, where somebody else than the optimizer has written something else."""
        for piece in self._owned.values() if self.narrow else ():
            if piece is not None and piece.tensor is not None:
                own, master = flat(piece.parameter.data)[piece.start : piece.stop], piece.tensor.data
                master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))

    def _guard_state(self) -> None:
        if type(self.optimizer.state) is not PieceStates:  # at first, and where somebody has put another in its place
            self.optimizer.state = PieceStates(self.optimizer.state, self._owned)

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This rank's piece of a parameter, with its gradient; None if other ranks step all of it."""
        if self.is_apart(parameter):
            return parameter
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ModelError(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, and an optimizer whose state is "
                "sharded: give it an optimizer of its own"
            )
        piece = self._owned.get(parameter)  # none of one at another stage
        if piece is None or piece.tensor is None:
            return None
        if not self.narrow:  # the parameter's memory may be another one by now
            piece.tensor.data = flat(parameter.data)[piece.start : piece.stop]
        gradient = None if parameter.grad is None else flat(laid_out_like(parameter.grad, parameter))
        piece.tensor.grad = None if gradient is None else gradient[piece.start : piece.stop].to(piece.tensor.dtype)
        return piece.tensor

    def _put_back(self) -> None:
        assert self._whole is not None, "a step ends after it began"
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._whole = None
        for piece in self._owned.values():
            if piece is not None and piece.tensor is not None:
                piece.tensor.grad = None

    @torch.no_grad()
    def _share(self, *, has_failed: bool) -> list[int]:
        """Gather what the ranks have stepped, and which have failed, where it can be told. Every rank must call it."""
        failed: list[int] = []
        for bucket in self.buckets:
            dtype = next(piece.parameter.dtype for pieces in bucket.pieces for piece in pieces)
            mark = torch.full((1,), has_failed, dtype=dtype, device=self.axis.device)
            own = [p.tensor.detach().to(dtype) for p in bucket.pieces[self.axis.rank] if p.tensor is not None]
            lengths = [length + 1 for length in bucket.lengths]
            stepped = all_gather_parts(torch.cat([*own, mark]), lengths, self.axis, label=LABEL).wait().split(lengths)
            for pieces, values in zip(bucket.pieces, stepped, strict=True):
                sizes = [piece.stop - piece.start for piece in pieces]
                for piece, part in zip(pieces, values[:-1].split(sizes), strict=True):
                    flat(piece.parameter.data)[piece.start : piece.stop].copy_(part)
            if not mark.is_cuda:  # to look would wait for the device
                failed = [rank for rank, values in enumerate(stepped) if values[-1]]
        return failed

    def _state_of(self, piece: Piece) -> dict[str, Any]:
        assert piece.tensor is not None, "a rank has its own pieces' tensors"
        state = self.optimizer.state.get(piece.tensor, {})
        return {**state, _MASTER: piece.tensor.detach()} if self.narrow else dict(state)

    def _gather_state(
        self,
        bucket: Bucket,
        name: str,
        own: Sequence[dict[str, Any]],
        heard: Sequence[Sequence[dict[str, Any]]],
        whole: dict[Tensor, dict[str, Any]],
    ) -> None:
        """Add one entry of the states of a bucket's parameters, those that have it on the ranks that step them."""
        pieces = [
            (piece, state)
            for pieces, states in zip(bucket.pieces, heard, strict=True)
            for piece, state in zip(pieces, states, strict=True)
            if name in state
        ]
        for piece, state in pieces:
            kind = state[name]
            if not isinstance(kind, torch.dtype):
                whole.setdefault(piece.parameter, {})[name] = kind
        split = [(piece, state[name]) for piece, state in pieces if isinstance(state[name], torch.dtype)]
        if not split:
            return
        lengths = [
            sum(p.stop - p.start for p, s in zip(ps, states, strict=True) if isinstance(s.get(name), torch.dtype))
            for ps, states in zip(bucket.pieces, heard, strict=True)
        ]
        parts = [
            state[name].detach().reshape(-1)
            for state, kinds in zip(own, heard[self.axis.rank], strict=True)
            if isinstance(kinds.get(name), torch.dtype)
        ]
        part = torch.cat(parts) if parts else torch.empty(0, dtype=split[0][1], device=self.axis.device)
        gathered = all_gather_parts(part, lengths, self.axis, label=STATE_LABEL).wait()
        for (piece, dtype), values in zip(split, gathered.split([p.stop - p.start for p, _ in split]), strict=True):
            state = whole.setdefault(piece.parameter, {})
            if name not in state:
                state[name] = torch.empty_like(piece.parameter, dtype=dtype)
            flat(state[name])[piece.start : piece.stop].copy_(values)


def shard_optimizer(
    optimizer: Optimizer,
    axis: Axis,
    *,
    narrow: torch.dtype | None = None,
    elementwise: bool | None = None,
    leave: Collection[int] = (),
) -> OptimizerShards:
    """Shard an optimizer's state over the ranks of an axis that hold replicas. Every rank of it must call it, alike.

    The optimizer stays the same object. Its parameters stay replicas, bitwise alike, and what it steps is what one
    process would. `state_dict()` is whole, as that of one process, and `load_state_dict` takes such a one: every rank
    of the axis must call them. One that calls `state_dict()` alone raises when the others take another step or leave.

    Args:
        optimizer: Of `torch.optim`, element-wise, over dense parameters; before its first step, or after.
        axis: `mesh["data"]`, say; gradients must be the same on all its ranks when it steps.
        narrow: `torch.bfloat16`, say, to keep parameters, and so gradients, in that, and this rank's part of their
            masters as they are. On an axis of one rank this is all that happens.
        elementwise: Whether the optimizer treats every number of a parameter alike; None to go by its class, which is
            one of torch's or was given to `register_elementwise`.
        leave: Identities of parameters that it steps as without this, tables with sparse gradients say; tables that are
            split it does so anyway.

    Raises:
        ModelError: If the optimizer is not element-wise, or has no parameters.

    Example:
        >>> import torch, tulle
        >>> axis = tulle.init(data=-1)["data"]
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> shards = shard_optimizer(optimizer, axis)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """
    kind = type(optimizer)
    if not (is_shardable(optimizer) if elementwise is None else elementwise):
        raise ModelError(
            f"the state of a {kind.__name__} is not known to be element-wise, so it cannot be sharded: use one of "
            f"{', '.join(one.__name__ for one in SHARDABLE)}, or say elementwise=True if it treats every number alike"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ModelError(f"the {kind.__name__} has no parameters: give it the model's")
    shards = OptimizerShards(optimizer, axis, narrow, leave)
    if axis.size == 1 and narrow is None:
        return shards
    shards.take_parts(dict(optimizer.state))
    if axis.size > 1:
        follow_steps(axis)
    hook_last(optimizer, shards.before_step)
    hook_first_after(optimizer, shards.after_step)
    hook_failed(optimizer, shards.give_up)
    give_whole_states(optimizer, shards)
    return shards


def _kinds(state: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Of each entry of a piece's state its dtype, if it has a number for each element, else its value."""
    length = piece.stop - piece.start
    return {
        name: value.dtype if isinstance(value, Tensor) and value.shape == (length,) else value
        for name, value in state.items()
    }


def _part(name: str, value: Any, piece: Piece) -> Any:
    """This piece's part of an entry of a parameter's state; of a parameter that is one number, by the entry's name."""
    is_whole = isinstance(value, Tensor) and value.shape == piece.parameter.shape and name not in _SCALARS
    if is_whole:
        value = value.to(piece.parameter.device)
        return flat(laid_out_like(value, piece.parameter))[piece.start : piece.stop].clone()
    return value
