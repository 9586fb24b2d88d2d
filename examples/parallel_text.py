"""Aligned text: read with errors that name the line, held out by hash, turned into subwords, cut into batches."""

import itertools
import lzma
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tulle.errors import DataError

PAD, BEGIN, END = range(3)

Pair = tuple[str, str]
"""A source sentence and its translation."""

EncodedPair = tuple[list[int], list[int]]
"""The same as subword numbers: `source END` and `BEGIN target END`."""


def read_pairs(files: str) -> list[Pair]:
    """Read `(source, target)` pairs from a TSV, or from two aligned files given as "a.en,b.de"; each may be `.xz`.

    A TSV holds source and target in its first two columns; further columns (where a pair came from, say) are not read.

    Raises:
        DataError: a file is missing, empty, damaged, misaligned or not UTF-8. Nothing has been sent by then.
    """
    names = files.split(",")
    if len(names) > 2:
        raise DataError(f"{files!r} names {len(names)} files; expected one TSV, or two aligned files as 'a.en,b.de'")
    columns = [_read_lines(Path(name.strip())) for name in names]
    if len(names) == 1:
        return [_split_line(line, number, files) for number, line in enumerate(columns[0], start=1)]
    lengths = [len(lines) for lines in columns]
    if lengths[0] != lengths[1]:
        raise DataError(
            f"{names[0]} has {lengths[0]} lines and {names[1]} has {lengths[1]}; expected line N of one to be the "
            "translation of line N of the other. Align them again, or join them into one TSV"
        )
    return [_checked(pair, number, files) for number, pair in enumerate(zip(*columns, strict=True), start=1)]


def _read_lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        text = content.decode("utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist (looked in {path.absolute().parent}). Correct the path") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Expected a text file, plain or .xz") from error
    except lzma.LZMAError as error:
        raise DataError(f"{path} is not a whole .xz file: {error}. Copy or compress it again") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}, in line {line}. "
            f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n").split("\n")
    if lines == [""]:
        raise DataError(f"{path} is empty; expected at least one line of text")
    return lines


def _split_line(line: str, number: int, files: str) -> Pair:
    columns = line.split("\t")
    if len(columns) < 2:
        raise DataError(
            f"{files}, line {number} has no tab: {line[:60]!r}; expected source<TAB>target. Mend or remove the line, "
            "or give two aligned files as 'a.en,b.de'"
        )
    return _checked((columns[0], columns[1]), number, files)


def _checked(pair: Pair, number: int, files: str) -> Pair:
    source, target = pair[0].strip(), pair[1].strip()
    if not source or not target:
        side = "target" if source else "source"
        raise DataError(f"{files}, line {number} has an empty {side}; expected text on both sides. Remove the line")
    return source, target


def read_or_hold_out(files: str | None, pairs: list[Pair], count: int) -> tuple[list[Pair], list[Pair]]:
    """Return what to train on and what to measure on: `files` if they were named, else `count` sources of `pairs`."""
    return (pairs, read_pairs(files)) if files else hold_out(pairs, count)


def hold_out(pairs: Sequence[Pair], count: int) -> tuple[list[Pair], list[Pair]]:
    """Split off the pairs of the `count` sources with the smallest hashes (a twentieth of the sources at most).

    All pairs of one source, in whatever case it is written, land in the same part, so that nothing held out was
    trained on. The held-out part is in the order of the hashes: its first N pairs are a random sample too.

    Raises:
        DataError: There are fewer than two different sources, so that nothing would be left to train on.
    """
    sources = sorted({source.casefold() for source, _ in pairs}, key=_hash)
    if len(sources) < 2:
        raise DataError(
            f"{len(sources)} different source sentences cannot be split into a part to train on and a part to hold "
            "out; expected at least 2. Add text, or give the held-out part as a file of its own"
        )
    places = {source: place for place, source in enumerate(sources[: min(count, max(1, len(sources) // 20))])}
    kept = [pair for pair in pairs if pair[0].casefold() not in places]
    held_out = [pair for pair in pairs if pair[0].casefold() in places]
    return kept, sorted(held_out, key=lambda pair: places[pair[0].casefold()])


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def learn_vocabulary(pairs: Sequence[Pair], size: int) -> Tokenizer:
    """Learn a joint vocabulary of `size` subwords from both sides of `pairs`, by byte-pair encoding.

    It works on bytes, so that no text is out of vocabulary and decoding gives the text back.
    """
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<begin>", "<end>"],  # PAD, BEGIN, END
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    vocabulary.train_from_iterator(itertools.chain.from_iterable(pairs), trainer)
    return vocabulary


def encode(pairs: Sequence[Pair], vocabulary: Tokenizer) -> list[EncodedPair]:
    """Turn text into subword numbers; a "<pad>" that stands in the text stays text."""
    vocabulary.encode_special_tokens = True
    sources = vocabulary.encode_batch_fast([source for source, _ in pairs])
    targets = vocabulary.encode_batch_fast([target for _, target in pairs])
    return [([*source.ids, END], [BEGIN, *target.ids, END]) for source, target in zip(sources, targets, strict=True)]


def count_tokens(batch: Sequence[EncodedPair]) -> int:
    """Number of target tokens that a model predicts in `batch`: all but each sentence's BEGIN."""
    return sum(len(target) - 1 for _, target in batch)


def cut(pairs: Sequence[EncodedPair], tokens_per_batch: int) -> list[list[EncodedPair]]:
    """Cut `pairs`, sorted by length, into batches of at most `tokens_per_batch` target tokens (or one longer pair)."""
    batches: list[list[EncodedPair]] = []
    room = 0
    for pair in sorted(pairs, key=_lengths):
        tokens = count_tokens([pair])
        if tokens > room or not batches:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(pair)
        room -= tokens
    return batches


def endless_batches(pairs: Sequence[EncodedPair], tokens_per_batch: int, seed: int) -> Iterator[list[EncodedPair]]:
    """Yield global batches of similar length, epoch after epoch: a function of `seed`, the same on every rank.

    Which pairs of a length meet in a batch, and the order of the batches, change from epoch to epoch.
    """
    for epoch in itertools.count():
        order = random.Random(f"{seed}, {epoch}")
        batches = cut(order.sample(pairs, len(pairs)), tokens_per_batch)
        yield from order.sample(batches, len(batches))


def _lengths(pair: EncodedPair) -> tuple[int, int]:
    return len(pair[0]), len(pair[1])
