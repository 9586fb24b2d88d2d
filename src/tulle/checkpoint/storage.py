"""Blocks of placed tensors, to and from files, by the writer and the reader of `torch.distributed.checkpoint`.

Of its two interfaces, planner and storage, ours is the planner: a block is made when the writer comes to it, so that of
a table in natural order no more than that is there. What is written is an ordinary checkpoint of PyTorch's, which
`torch.distributed.checkpoint.format_utils.dcp_to_torch_save` turns into one file.

Importing that package takes most of a second: this file is imported when something is saved.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from tulle.checkpoint.folder import Folder, Stamps, stamps_of
from tulle.checkpoint.placed import Box, Placed
from tulle.checkpoint.state import Names
from tulle.errors import CheckpointError, TulleError

METADATA = ".metadata"
_KNOWN_CLASSES = {
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "metadata.Metadata",
        "metadata.TensorStorageMetadata",
        "metadata.TensorProperties",
        "metadata._MEM_FORMAT_ENCODING",
        "metadata.ChunkStorageMetadata",
        "metadata.MetadataIndex",
        "metadata.StorageMeta",
        "filesystem._StorageInfo",
    )
} | {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath"}


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written.

    Args:
        items: Its blocks.
        results: Where each lies.
        stamps: Of its files.
    """

    items: list[WriteItem]
    results: list[WriteResult]
    stamps: Stamps


def write_blocks(folder: Path, tensors: Sequence[Placed], rank: int) -> Written:
    """Write this rank's blocks. Every rank must call it: if it fails here, this rank still gives the others their rows.

    Args:
        folder: Where to.
        tensors: The same on all ranks, in one order.
        rank: Names this rank's file.
    """
    planner = _BlockByBlock(tensors)
    results: list[WriteResult] = []
    try:
        if planner.items:
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # serially: block after block
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
            plan = writer.prepare_local_plan(SavePlan(planner.items))
            results = writer.write_data(plan, planner).wait()
    except Exception:
        planner.drain()
        raise
    planner.drain()
    return Written(planner.items, results, stamps_of(folder, {one.storage_data.relative_path for one in results}))


def write_metadata(folder: Path, written: Sequence[Written], names: Names) -> Stamps:
    """Write what all ranks' files contain; one rank must call it, once all have written.

    Args:
        folder: Where to.
        written: By all ranks.
        names: Of the tensors of which blocks were written.

    Returns:
        Stamps of all files.
    """
    _, metadata = create_default_global_save_plan([SavePlan(one.items) for one in written])
    results = [result for one in written for result in one.results]
    metadata.planner_data = names.paths | {alias.name: alias.path for alias in names.aliases}
    for alias in names.aliases:
        metadata.state_dict_metadata[alias.name] = metadata.state_dict_metadata[alias.first]
        results += [
            replace(result, index=MetadataIndex(alias.name, result.index.offset))
            for result in results
            if result.index.fqn == alias.first
        ]
    FileSystemWriter(folder).finish(metadata, [results])
    stamps = {name: stamp for one in written for name, stamp in one.stamps.items()}
    return stamps | stamps_of(folder, [METADATA])


class Reader:
    """Reads boxes of a checkpoint's tensors, however they were cut when they were written.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: If what says which block lies where is damaged.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.path
        self._storage = FileSystemReader(folder.path)
        try:
            with (folder.path / METADATA).open("rb") as file:
                self._metadata: Metadata = _MetadataUnpickler(file).load()
        except Exception as problem:  # a damaged file can make the reader raise anything
            raise folder.damaged(METADATA, f"the reader said: {problem}") from problem
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read_into(self, tensors: Sequence[Placed]) -> None:
        """Read all blocks of tensors and settle them. Every rank must call it: one that fails takes part to the end.

        Raises:
            CheckpointError: If a block cannot be read; tensors may be overwritten in part.
        """
        error: TulleError | None = None
        for placed in tensors:
            for number, box in enumerate(placed.boxes):
                room = placed.room(number)
                try:
                    if error is None and not box.is_empty:
                        self._read(placed.name, box, room)
                except Exception as problem:  # a damaged file can make the reader raise anything
                    error = CheckpointError(
                        f"cannot read {placed.name!r} of the checkpoint {str(self._folder)!r}: {problem}; model and "
                        "optimizers are partly overwritten: load again, or start anew"
                    )
                placed.settle(number, room)
        if error is not None:
            raise error

    def _read(self, name: str, box: Box, room: Tensor) -> None:
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata), "all that tulle saves there are tensors"
        items = create_read_items_for_chunk_list(name, saved, [_chunk(box)])
        self._storage.read_data(LoadPlan(items), _Into(room)).wait()


class _BlockByBlock(DefaultSavePlanner):
    """Makes each block when the writer asks for it, in their order, and with it those that other ranks wait for."""

    def __init__(self, tensors: Sequence[Placed]) -> None:
        super().__init__()
        self.items = [_write_item(placed, box) for placed in tensors for box in placed.written if _is_due(placed, box)]
        self._blocks = self._all_blocks(tensors)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The next block, which is this item's."""
        for placed, box, values in self._blocks:
            if _is_due(placed, box):
                assert (placed.name, box.offsets) == (write_item.index.fqn, write_item.index.offset), "one order"
                return values
        raise AssertionError("there are as many blocks as items")

    def drain(self) -> None:
        """Take part in the making of the blocks that are left."""
        for _ in self._blocks:
            pass

    @staticmethod
    def _all_blocks(tensors: Sequence[Placed]) -> Iterator[tuple[Placed, Box, Tensor]]:
        for placed in tensors:
            for box, values in placed.blocks():
                yield placed, box, values


class _Into(DefaultLoadPlanner):
    """Where the pieces of one box go."""

    def __init__(self, room: Tensor) -> None:
        super().__init__()
        self._room = room

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        ends = [first + length for first, length in zip(read_item.dest_offsets, read_item.lengths, strict=True)]
        return self._room[tuple(slice(first, end) for first, end in zip(read_item.dest_offsets, ends, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the values were read to where they belong."""


class _MetadataUnpickler(pickle.Unpickler):
    """PyTorch's format is a pickle; this reads the few classes that it is made of, and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13, and no other, calls it
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _KNOWN_CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _write_item(placed: Placed, box: Box) -> WriteItem:
    properties = TensorProperties(dtype=placed.tensor.dtype)
    data = TensorWriteData(chunk=_chunk(box), properties=properties, size=torch.Size(placed.shape))
    return WriteItem(MetadataIndex(placed.name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _is_due(placed: Placed, box: Box) -> bool:
    """A rank may have nothing to write of a tensor while others have; a tensor without elements is written too."""
    return not box.is_empty or 0 in placed.shape


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
