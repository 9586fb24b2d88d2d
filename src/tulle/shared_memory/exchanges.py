"""All-reduce and all-to-all through shared memory: what each rank reads of the others', and what it computes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from tulle.shared_memory.channel import Channel, is_carried
from tulle.shared_memory.messages import Place
from tulle.shared_memory.region import flat_bytes, unseen
from tulle.shared_memory.works import Task, Work, Works

_PIECE_BYTES = 1 << 20
"""A reduction goes in pieces: those of all ranks stay in the caches, and slots stay small."""
_SHARED_OUT_BYTES = 64 << 10
"""Of more than two ranks, each computes a share of a larger piece, and reads the shares of the others."""
_AT_ONCE_BYTES = 256 << 10
"""A larger reduction of two is left to the thread, which does it beside what this one computes."""
_BETWEEN_HOSTS_BYTES = 4 << 20
"""Pieces of a share that go to other hosts, while the next is reduced and the one before is handed round."""
Across = Callable[[Tensor], Callable[[], object]]
"""Begins to reduce a tensor in place with other hosts', and gives what waits for the end of it."""
Operation = Literal["sum", "max", "min"]
_OPERATIONS: Mapping[Operation, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def all_to_all(works: Works, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Work:
    """Send flat bytes to each other rank by its place, and receive some from each.

    Args:
        works: Among whom.
        sends: What goes to each; not to be written before the work is done.
        receives: What is filled with what comes from each.
    """
    channel = works.channel

    def end(number: int) -> None:
        for other in channel.others:
            receives[other].copy_(channel.hear(number, other, len(receives[other])))

    is_small = is_carried([*sends.values(), *receives.values()])
    return works.submit(Task(end, lambda: channel.tell(sends), is_small))


def all_reduce(works: Works, tensor: Tensor, op: Operation = "sum", across: Across | None = None) -> Work:
    """Reduce a contiguous tensor in place, in the order of ranks: the same bits on all of them.

    Args:
        works: Among whom.
        tensor: What is reduced.
        op: How.
        across: Reduces with other hosts, whose ranks of the same places do the same, each a share: called in the thread
            of the works.
    """
    with unseen():
        return _submit(works, flat_bytes(tensor).view(tensor.dtype), _OPERATIONS[op], across)


def _submit(works: Works, numbers: Tensor, operation: Callable[..., Tensor], across: Across | None) -> Work:
    channel, raw = works.channel, numbers.view(torch.uint8)
    if across is not None or len(raw) > (_AT_ONCE_BYTES if channel.size == 2 else _SHARED_OUT_BYTES):
        if (where := channel.place_of(raw)) is not None:
            return works.submit(Task(lambda _: _in_place(channel, numbers, where, operation, across)))
        piece_bytes = _PIECE_BYTES if across is None else _BETWEEN_HOSTS_BYTES * channel.size
        pieces = numbers.split(piece_bytes // numbers.element_size())
        return works.submit(Task(lambda _: _in_pieces(channel, pieces, operation, across)))
    sends = dict.fromkeys(channel.others, raw)
    return works.submit(
        Task(
            lambda number: _of_all(channel, number, numbers, operation),
            lambda: channel.tell(sends),
            is_carried([raw]),
        )
    )


def _in_place(
    channel: Channel, numbers: Tensor, where: Place, operation: Callable[..., Tensor], across: Across | None
) -> None:
    """Reduce a share of what all lend, and write it to each of them."""
    number = channel.share(numbers.view(torch.uint8), where)
    parts = _heard(channel, number, numbers) | {channel.place: numbers}
    length = -(-len(numbers) // channel.size)
    shares = [parts[place][channel.place * length : (channel.place + 1) * length] for place in range(channel.size)]
    if across is None:
        _reduce(shares, shares, operation)
    else:
        _reduce_across(shares, channel.place, operation, across)
    channel.meet()


def _reduce(shares: Sequence[Tensor], targets: Sequence[Tensor], operation: Callable[..., Tensor]) -> None:
    """Reduce shares piece by piece, and write each piece to some targets, which may be shares."""
    length = _PIECE_BYTES // shares[0].element_size()
    for pieces, written in zip(_pieces(shares, length), _pieces(targets, length), strict=True):
        reduced = operation(pieces[0], pieces[1])
        for piece in pieces[2:]:
            operation(reduced, piece, out=reduced)
        for piece in written:
            piece.copy_(reduced)


def _reduce_across(shares: Sequence[Tensor], place: int, operation: Callable[..., Tensor], across: Across) -> None:
    """Reduce shares with those of other hosts, and write the result to all."""
    under_way: list[tuple[Sequence[Tensor], Callable[[], object]]] = []
    for pieces in _pieces(shares, _BETWEEN_HOSTS_BYTES // shares[0].element_size()):
        _reduce(pieces, [pieces[place]], operation)
        under_way.append((pieces, across(pieces[place])))
    for pieces, wait in under_way:
        wait()
        for other in (*pieces[:place], *pieces[place + 1 :]):
            other.copy_(pieces[place])


def _pieces(shares: Sequence[Tensor], length: int) -> Iterator[Sequence[Tensor]]:
    """Pieces of some shares that belong together."""
    return zip(*(share.split(length) for share in shares), strict=True)


def _in_pieces(
    channel: Channel, pieces: Sequence[Tensor], operation: Callable[..., Tensor], across: Across | None
) -> None:
    for piece in pieces:
        if across is not None or (channel.size > 2 and piece.nbytes > _SHARED_OUT_BYTES):
            _in_shares(channel, piece, operation, across)
        else:
            number = channel.tell(dict.fromkeys(channel.others, piece.view(torch.uint8)))
            _of_all(channel, number, piece, operation)


def _in_shares(channel: Channel, numbers: Tensor, operation: Callable[..., Tensor], across: Across | None) -> None:
    """Reduce a share, and copy those that others have reduced."""
    number, shown = channel.show(numbers.view(torch.uint8))
    parts = _heard(channel, number, numbers) | {channel.place: shown.view(numbers.dtype)}
    length = -(-len(numbers) // channel.size)
    shares = [slice(place * length, (place + 1) * length) for place in range(channel.size)]
    own = shares[channel.place]
    _put(operation, [parts[place][own] for place in range(channel.size)], numbers[own])
    if across is not None:
        across(numbers[own])()
    parts[channel.place][own].copy_(numbers[own])
    channel.meet()
    for other in channel.others:
        numbers[shares[other]].copy_(parts[other][shares[other]])


def _of_all(channel: Channel, number: int, numbers: Tensor, operation: Callable[..., Tensor]) -> None:
    """Reduce what all have told."""
    own = numbers.clone() if channel.place > 1 else numbers  # the third is read after the result was first written
    parts = _heard(channel, number, numbers) | {channel.place: own}
    _put(operation, [parts[place] for place in range(channel.size)], numbers)


def _heard(channel: Channel, number: int, like: Tensor) -> dict[int, Tensor]:
    return {other: channel.hear(number, other, like.nbytes).view(like.dtype) for other in channel.others}


def _put(operation: Callable[..., Tensor], parts: Sequence[Tensor], result: Tensor) -> None:
    operation(parts[0], parts[1], out=result)
    for part in parts[2:]:
        operation(result, part, out=result)
