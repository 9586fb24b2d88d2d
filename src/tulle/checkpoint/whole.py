"""`full_state_dict`: states under plain PyTorch names and shapes, collected from the ranks block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.checkpoint.placed import Part, Sharded, is_dealt
from tulle.checkpoint.ranks import Ranks
from tulle.checkpoint.saving import await_saves
from tulle.checkpoint.standing import Standing
from tulle.checkpoint.state import unmarked, versions_of, with_versions
from tulle.comm import broadcast, lane, receive, send
from tulle.distribute.axes import SAVING
from tulle.mesh import Axis
from tulle.parts import local_of
from tulle.tables.natural import block_rows_of, natural_order
from tulle.tables.split import Split
from tulle.tensor_parallel import Placement


def full_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Any]:
    """A model's state as one process would have it, on rank 0. Every rank of the model's mesh must call it.

    It is for `torch.save`, or for `load_state_dict` of the same model without tulle. What is split is collected some
    rows at a time, so that ranks which do not get the whole need no memory for it.

    Args:
        model: Distributed or plain.
        everywhere: Whether all ranks get it, not rank 0 alone.

    Returns:
        A copy of each tensor, in main memory and in its whole shape, by the name that it has in plain PyTorch; tied
        parameters share a copy. An empty dictionary on ranks that do not get it.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Linear(2, 1)
        >>> {name: list(value.shape) for name, value in tulle.full_state_dict(model).items()}
        {'weight': [1, 2], 'bias': [1]}
    """
    await_saves()  # which may travel on the same lane
    standing = Standing(model)
    is_destination = everywhere or standing.ranks.is_first
    own = standing.state()
    firsts = standing.first_names(own)
    state: dict[str, Any] = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            state[name] = value
        elif firsts.get(name, name) != name:
            state[name] = state[firsts[name]]
        elif value.layout != torch.strided:
            state[name] = _sparse(name, value, standing)
        else:
            state[name] = _whole(name, value, standing, everywhere=everywhere, is_destination=is_destination)
    return with_versions(state, versions_of(own)) if is_destination else {}


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state as one process would have it, on rank 0. Every rank of the model's mesh must call it.

    `load_state_dict` of an optimizer that was distributed takes it, on any number of ranks, and so does a plain one's.

    Args:
        model: Distributed or plain; not on a mesh with axis `pipe`, along which each rank has states of its own.
        optimizer: Over its parameters.

    Returns:
        What `state_dict` gives, each part in its whole shape. Elsewhere nothing.
    """
    standing, state = Standing(model), unmarked(optimizer.state_dict())
    assert not standing.is_staged, "callers refuse pipelines"
    parts = [standing.share_of(parameter).part for group in optimizer.param_groups for parameter in group["params"]]
    is_first, wholes = standing.ranks.is_first, dict(state["state"])
    for number in sorted(key for key in wholes if isinstance(key, int)):  # in one order on all ranks
        values = wholes[number]
        wholes[number] = {key: _whole_of(parts[number], values[key], is_first=is_first) for key in sorted(values)}
    return {**state, "state": wholes} if is_first else {}


def blocks_of_whole(
    name: str, value: Tensor, standing: Standing, *, everywhere: bool = False
) -> Iterator[tuple[range, Tensor]]:
    """A tensor of the state, from its first row to its last, at rank 0 or at all; elsewhere blocks mean nothing.

    Every rank of the mesh must take all blocks. A tensor without rows is one block of row 0.

    Args:
        name: In the state.
        value: What this rank has of it.
        standing: Says what that is.
        everywhere: Whether all ranks get them.
    """
    share, axes = standing.share(name), standing.axes
    pipe = axes.pipe if axes else None
    if pipe is None or name not in standing.holders:
        yield from _blocks_here(value, share.part, everywhere=everywhere)
        return
    assert axes is not None, "stages are along an axis"
    is_line = everywhere or (axes.data.rank == 0 and (axes.model is None or axes.model.rank == 0))
    if standing.is_elsewhere(name):
        blocks = ((rows, None) for rows in _ranges(value, share.part))
    else:
        blocks = _blocks_here(value, share.part, everywhere=everywhere)
    for rows, block in blocks:
        if block is None:
            shape = (len(rows), share.part.width) if isinstance(share.part, Split) else _shape(value, share.part)
            block = value.new_empty(shape, device=pipe.device)
        yield rows, _moved(block, share.holder, pipe, everywhere=everywhere) if is_line else block


def _moved(block: Tensor, holder: int, pipe: Axis, *, everywhere: bool) -> Tensor:
    """A block that the first stage which has it gives to all, or to the first. Every rank of the axis must call it."""
    axis, values = lane(pipe, SAVING), local_of(block).contiguous()
    if not values.numel():
        return values
    flat = values.reshape(-1).view(torch.uint8)  # as bytes: gloo has no bool, for one
    if everywhere:
        broadcast(flat, axis, label=SAVING, source=holder).wait()
    elif holder and axis.rank == holder:
        send(flat, axis, to=0, label=SAVING).wait()
    elif holder and axis.rank == 0:
        receive(flat, axis, source=holder, label=SAVING).wait()
    return values


def _blocks_here(value: Tensor, part: Part | None, *, everywhere: bool) -> Iterator[tuple[range, Tensor]]:
    """The blocks of what this rank's stage has."""
    if isinstance(part, Split):
        order = natural_order(part)
        for rows in _ranges(value, part):
            wanted = [rows if everywhere or rank == 0 else range(0) for rank in range(part.axis.size)]
            yield rows, order.collect(value, wanted)
    else:
        whole = part.whole(value, label=SAVING) if isinstance(part, Placement | Sharded) else value
        yield _ranges(value, part)[0], whole


def _ranges(value: Tensor, part: Part | None) -> list[range]:
    """The rows of each block."""
    if not isinstance(part, Split):
        shape = _shape(value, part)
        return [range(shape[0] if shape else 1)]
    block_rows = block_rows_of(value.element_size() * part.width)
    return [range(first, min(first + block_rows, part.num_rows)) for first in range(0, part.num_rows, block_rows)]


def _shape(value: Tensor, part: Part | None) -> tuple[int, ...]:
    return tuple(part.shape if part is not None else value.shape)


def _sparse(name: str, value: Tensor, standing: Standing) -> Tensor:
    """A copy of a sparse buffer, of which a stage has all."""
    copied = None if standing.is_elsewhere(name) else local_of(value).cpu().clone()
    pipe = standing.axes.pipe if standing.axes else None
    found = Ranks(pipe).gather(copied)[standing.holders.get(name, 0) if pipe else 0]
    assert found is not None, "its holder has it"
    return found


def _whole(name: str, value: Tensor, standing: Standing, *, everywhere: bool, is_destination: bool) -> Tensor:
    shape = _shape(value, standing.share(name).part)
    blocks = blocks_of_whole(name, value, standing, everywhere=everywhere)
    return _joined(blocks, shape if is_destination else None, value.dtype)


def _whole_of(part: Part | None, value: object, *, is_first: bool) -> object:
    """A value of an optimizer's state: of what is dealt to the ranks as its parameter is the whole."""
    if part is None or not isinstance(value, Tensor) or not is_dealt(value, part):
        return value
    shape = part.shape_of_whole(value.shape) if isinstance(part, Split) else part.shape
    if value.is_sparse:  # the momentum of this rank's rows
        value = value.to_dense()
    return _joined(_blocks_here(value, part, everywhere=False), shape if is_first else None, value.dtype)


def _joined(blocks: Iterator[tuple[range, Tensor]], shape: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """All blocks of a tensor of this shape; without a shape they are taken, as all ranks must, and left."""
    whole = torch.empty((0,) if shape is None else tuple(shape), dtype=dtype)
    for rows, block in blocks:
        if shape:
            whole[rows.start : rows.stop] = block
        elif shape is not None:
            whole.copy_(block)
    return whole
