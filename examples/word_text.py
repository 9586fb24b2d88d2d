"""Text as numbers of words: read with errors that say the mend, counted, and cut into windows."""

import lzma
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tulle.errors import DataError

UNKNOWN, END = "<unk>", "<end>"


def read_lines(path: Path) -> list[list[str]]:
    """The words of each line: what spaces separate; of a TSV, words and punctuation of the first column. May be `.xz`.

    Raises:
        DataError: The file is missing, damaged, empty or not UTF-8. Nothing has been sent by then.
    """
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be used: {error}. Expected text in UTF-8, plain or .xz") from error
    if ".tsv" in path.suffixes:
        lines = [re.findall(r"\w+|[^\w\s]", line.partition("\t")[0]) for line in text.splitlines()]
    else:
        lines = [line.split() for line in text.splitlines()]
    if not any(lines):
        raise DataError(f"{path} has no words; expected at least one line of text")
    return lines


def hold_out(lines: list[list[str]], count: int) -> tuple[list[list[str]], list[list[str]]]:
    """`count` lines, at even distances, and all others."""
    every = max(2, len(lines) // max(1, count))
    return [line for number, line in enumerate(lines) if number % every], lines[::every]


def learn_vocabulary(lines: list[list[str]], min_count: int) -> dict[str, int]:
    """The number of each word that occurs often enough, by falling frequency, as sampling expects them."""
    counts = Counter(word for line in lines for word in line)
    kept = Counter({word: count for word, count in counts.items() if count >= min_count})
    kept[UNKNOWN] += counts.total() - kept.total()
    kept[END] += len(lines)
    return {word: number for number, (word, _) in enumerate(sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])))}


def windows(lines: list[list[str]], vocabulary: dict[str, int], length: int) -> Tensor:
    """All lines end to end, cut into `[windows, length + 1]`: each begins with the word that ends the one before it."""
    unknown, end = vocabulary[UNKNOWN], [END]
    words = (vocabulary.get(word, unknown) for line in lines for word in (*line, *end))
    numbers = torch.from_numpy(np.fromiter(words, dtype=np.int64))
    if len(numbers) <= length:
        raise DataError(f"the text has {len(numbers)} words; expected more than --length {length}")
    return numbers.unfold(0, length + 1, length)
