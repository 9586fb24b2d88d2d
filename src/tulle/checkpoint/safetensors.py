"""`save_safetensors`: a model as one safetensors file, written block by block: no rank need hold a table whole.

The format is eight bytes that tell the length of a header, the header (JSON: dtype, shape and place of each tensor),
and the tensors' bytes end to end; https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from tulle.checkpoint.saving import await_saves
from tulle.checkpoint.standing import Standing
from tulle.checkpoint.whole import blocks_of_whole
from tulle.errors import CheckpointError
from tulle.parts import local_of

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.tensor.element_size()


def save_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a model's state as one safetensors file, on rank 0. Every rank of the model's mesh must call it.

    Names and shapes are those of plain PyTorch, so that `safetensors.torch.load_model` reads it without tulle. Split
    tables travel to rank 0 in blocks: the largest may be larger than its memory. The file is complete or absent.

    Args:
        path: The file, on a file system of rank 0; an older one of this name is replaced.
        model: Distributed or plain. Of two names of one tensor the first is written; the other is noted in the
            metadata, as safetensors' own writer does.
        metadata: Texts to be kept in the file's header.

    Raises:
        CheckpointError: On every rank, if the file cannot be written, or the state holds something that the format
            does not.

    Example:
        >>> import pathlib, tempfile, torch, tulle
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> tulle.save_safetensors(path, torch.nn.Linear(2, 1))
        >>> pathlib.Path(path).read_bytes()[8:41]
        b'{"__metadata__":{"format":"pt"},"'
    """
    await_saves()  # which may travel on the same lane
    standing = Standing(model)
    ranks, state, shapes = standing.ranks, standing.state(), standing.shapes()
    firsts = standing.first_names(state)
    entries: list[_Entry] = []
    with ranks.alike():
        path, notes = _checked(path), {"format": "pt", **_checked_notes(metadata or {})}
        for name, value in state.items():
            _check(name, value)
            first = firsts.get(name, name)
            if first == name:
                entries.append(_Entry(name, value, shapes.get(name, tuple(value.shape))))
            else:
                notes[name] = first
    # Aligned tensors: wide elements first, as safetensors' own writer has them.
    entries.sort(key=lambda entry: (-entry.tensor.element_size(), entry.name))
    aside = path.with_name(f".{path.name}.partial")

    def unwritten(problem: Exception) -> CheckpointError:
        return CheckpointError(f"cannot write {str(path)!r}: {problem}; an older file of that name is as it was")

    with ranks.alike(unwritten):
        blocks = _blocks(entries, standing)
        try:
            if ranks.is_first:
                _write(aside, path, _header(entries, notes), blocks)
        except Exception:
            _drain(blocks)
            raise
        _drain(blocks)


def _checked(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"a {type(path).__name__} was given for the file, expected its name: tulle.save_safetensors(path, model)"
        )
    if not Path(path).name:
        raise CheckpointError(f"{os.fspath(path)!r} was given for the file, expected one with a name")
    return Path(path)


def _checked_notes(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse what no reader takes: the file would be lost."""
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"a {type(metadata).__name__} was given as metadata, expected texts by name")
    for name, text in metadata.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise CheckpointError(
                f"metadata={{{name!r}: {text!r}}} was given, expected texts by name: str({text!r}), say"
            )
    return metadata


def _check(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _DTYPES:
        kind = f"{value.layout} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"the model's state has {name!r}, {kind}, expected dense tensors: safetensors holds nothing else; "
            "take tulle.full_state_dict and torch.save"
        )


def _header(entries: list[_Entry], notes: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(notes)}
    begin = 0
    for entry in entries:
        end = begin + entry.size_bytes
        dtype = _DTYPES[entry.tensor.dtype]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _blocks(entries: list[_Entry], standing: Standing) -> Iterator[Tensor]:
    """The tensors' values in the order of the file, on rank 0."""
    for entry in entries:
        yield from (block for _, block in blocks_of_whole(entry.name, entry.tensor, standing))


def _drain(blocks: Iterator[Tensor]) -> None:
    """Give the rows that other ranks wait for, whatever happened here."""
    for _ in blocks:
        pass


def _write(aside: Path, path: Path, header: bytes, blocks: Iterator[Tensor]) -> None:
    if path.exists() and not path.is_file():
        raise ValueError("it is there, and is no file")  # a device or a pipe would be replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(header)
            for block in blocks:
                _write_bytes(file, block)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except Exception:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def _write_bytes(file: IO[bytes], block: Tensor) -> None:
    values = local_of(block).cpu().contiguous().reshape(-1)
    file.write(values.view(torch.uint8).numpy().data)
