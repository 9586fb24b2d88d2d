"""What the models read: text cut into ids by rank and step, and generated clicks; read as `sparse-sync` reads it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy
import workloads
from job import TableShape, Workload
from networks import PAD, SENTENCE
from tokenizers import Tokenizer
from workloads import RANKS, Text

WORDS = {"lm-narrow": 512, "lm": 1024, "lm-wide": 2048}
"""Of a rank and step, by the size of the language model."""
SENTENCES = 32
"""Pairs a rank and step."""
LEAST_SUBWORDS = 16
"""Shorter sentences would be padding for the most part."""


def language_model(text: Text, cache: Path, name: str) -> Workload:
    """The words of `sparse-sync`, as many as go with the model's size, and an output table as large as the input's."""
    read = workloads.language_model(text, cache)
    (table,), drawn = read.tables, read.drawn[0][..., : WORDS[name]]
    shapes = tuple(TableShape(what, table.num_rows, table.width) for what in ("words", "output"))
    return Workload(name + text.suffix, shapes, (drawn, numpy.roll(drawn, -1, axis=-1)), read.about)


def translation(text: Text, cache: Path) -> Workload:
    """Pairs of sentences, each cut or padded: a table of sources, of targets and of outputs, over joint subwords."""
    workloads.translation(text, cache)  # learns the vocabulary, if it is not there
    vocabulary = Tokenizer.from_file(str(cache / f"subwords{text.suffix}.json"))
    encoded = vocabulary.encode_batch(list(chain.from_iterable(sentence_pairs(text))))
    ids = [one.ids for one in encoded]
    pairs = [pair for pair in zip(ids[::2], ids[1::2], strict=True) if min(map(len, pair)) >= LEAST_SUBWORDS]
    sides = [
        workloads.deal([pair[side] for pair in pairs], fitted, SENTENCES * SENTENCE, steps=text.steps)
        for side in (0, 1)
    ]
    shapes = [TableShape(name, vocabulary.get_vocab_size(), 512) for name in ("source", "target", "output")]
    about = "pairs of English and German sentences, joint subwords"
    return Workload("translation" + text.suffix, tuple(shapes), (*sides, sides[1]), about + _origin(text))


def recommender(text: Text, cache: Path) -> Workload:
    """The clicks of `sparse-sync`."""
    del text, cache  # they are generated
    return workloads.recommender()


TEXTS: dict[str, Callable[[Text, Path], Workload]] = {
    **{name: partial(language_model, name=name) for name in WORDS},
    "translation": translation,
    "recommender": recommender,
}


def prepare(names: Iterable[str], corpus: Path | None, folder: Path) -> dict[str, Path]:
    """Write the workloads that are not in the folder yet; where each of them is, by the name that it has."""
    text = Text.find(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name in names:
        path = folder / (name if name == "recommender" else name + text.suffix)
        if not path.with_suffix(".json").exists():
            TEXTS[name](text, folder).save(path)
        paths[path.name] = path
    return paths


def sentence_pairs(text: Text) -> Iterable[list[str]]:
    """Enough of the pairs for all ranks and steps."""
    enough = 8 * RANKS * text.steps * SENTENCES
    with lzma.open(text.pairs) as lines:
        return [line.decode().rstrip("\n").split("\t")[:2] for line in islice(lines, enough)]


def fitted(subwords: list[int]) -> list[int]:
    """A sentence of exactly `SENTENCE` subwords; the vocabulary's first is moved up, as `PAD` takes its number."""
    kept = [max(1, subword) for subword in subwords[:SENTENCE]]
    return kept + [PAD] * (SENTENCE - len(kept))


def _origin(text: Text) -> str:
    return " (the repository's sample)" if text.suffix else ""
