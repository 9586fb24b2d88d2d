"""What is looked up: real text and, beside it, generated streams, cut into ids by rank and step."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy
from job import TableShape, Workload
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "data"
Line = TypeVar("Line")
RANKS = 8
STEPS = 24
SAMPLE_STEPS = 8
LEAST_COUNT = 3
_LINES_TO_LEARN_FROM = 200_000

# Criteo's display-advertising challenge, 26 categorical features, as DLRM counts them.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True)
class Text:
    """Lines of one language and pairs of two, and how the workloads made from them are called."""

    english: Path
    pairs: Path
    vocabulary: Path | None
    suffix: str
    steps: int

    @staticmethod
    def find(corpus: Path | None) -> Text:
        """The corpus in a folder, or the sample that the repository holds."""
        if corpus is None:
            pairs = SAMPLE / "libreoffice.en-de.tsv.xz"
            return Text(pairs, pairs, None, "-sample", SAMPLE_STEPS)
        return Text(
            corpus / "language-model.en.train.txt.xz",
            corpus / "translation.en-de.train.tsv.xz",
            corpus / "language-model.en.vocab",
            "",
            STEPS,
        )

    def english_lines(self) -> list[str]:
        """The English text, of pairs their first column."""
        lines = _lines(self.english)
        return [line.partition("\t")[0] for line in lines] if self.english == self.pairs else lines


def language_model(text: Text, cache: Path) -> Workload:
    """Words seen at least 3 times, by falling frequency, and one row for all others: 2,048 tokens x 512."""
    del cache  # counting words is quick
    lines = text.english_lines()
    if text.vocabulary:
        listed = (line.rpartition("\t")[0] for line in _lines(text.vocabulary))
    else:
        counted = Counter(chain.from_iterable(line.split() for line in lines))
        listed = (word for word, count in counted.most_common() if count >= LEAST_COUNT)
    number = {word: row for row, word in enumerate(listed)}
    unknown = len(number)
    drawn = deal(lines, lambda line: (number.get(word, unknown) for word in line.split()), 2048, steps=text.steps)
    return _one_table("lm", text, unknown + 1, 512, drawn, "words of English text, each rank another part")


def translation(text: Text, cache: Path) -> Workload:
    """Joint subwords of both languages: 5,000 tokens, source and target, x 512."""
    pairs = [line.split("\t")[:2] for line in _lines(text.pairs)]
    path = cache / f"subwords{text.suffix}.json"
    vocabulary = _cached(path, lambda: _learn_subwords(chain.from_iterable(pairs), 32_000))
    drawn = deal(
        pairs, lambda pair: chain.from_iterable(e.ids for e in vocabulary.encode_batch(pair)), 5000, steps=text.steps
    )
    about = "joint subwords of English and German sentences"
    return _one_table("nmt", text, vocabulary.get_vocab_size(), 512, drawn, about)


def bert(text: Text, cache: Path) -> Workload:
    """Uncased word pieces, as many as BERT has: 4,096 tokens x 768."""
    lines = text.english_lines()
    path = cache / f"wordpieces{text.suffix}.json"
    vocabulary = _cached(path, lambda: _learn_pieces(lines[:_LINES_TO_LEARN_FROM], 30_522))
    drawn = deal(lines, lambda line: vocabulary.encode(line).ids, 4096, steps=text.steps)
    return _one_table("bert", text, 30_522, 768, drawn, "uncased word pieces of English text")


def recommender() -> Workload:
    """DeepFM-like: 26 categorical features, the largest cut to a million rows, x 16; 1,024 samples, Zipf ids."""
    generator = numpy.random.default_rng(26)
    tables = tuple(TableShape(f"feature{f}", min(rows, 10**6), 16) for f, rows in enumerate(CRITEO_CARDINALITIES))
    drawn = tuple(zipf(generator, table.num_rows, (RANKS, STEPS, 1024), 1.1) for table in tables)
    return Workload("recommender", tables, drawn, "generated: Zipf(1.1) ids with the cardinalities of Criteo")


def zipf_stream() -> Workload:
    """50,000 x 512, 4,096 Zipf(1.1) tokens: has more distinct rows and less overlap than text."""
    drawn = zipf(numpy.random.default_rng(50), 50_000, (RANKS, STEPS, 4096), 1.1)
    return Workload("zipf", (TableShape("table", 50_000, 512),), (drawn,), "generated: Zipf(1.1) ids")


WORKLOADS: dict[str, Callable[[Text, Path], Workload]] = {
    "zipf": lambda text, cache: zipf_stream(),
    "lm": language_model,
    "nmt": translation,
    "bert": bert,
    "recommender": lambda text, cache: recommender(),
}


def prepare(names: Iterable[str], corpus: Path | None, folder: Path) -> Iterator[Path]:
    """Write the workloads that are not in the folder yet; yields where each of them is, as it is there."""
    text = Text.find(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name}{text.suffix if name in ('lm', 'nmt', 'bert') else ''}"
        if not path.with_suffix(".json").exists():
            WORKLOADS[name](text, folder).save(path)
        yield path


def zipf(generator: numpy.random.Generator, rows: int, shape: tuple[int, ...], exponent: float) -> numpy.ndarray:
    """Row numbers drawn by Zipf's law, the most frequent first."""
    cumulative = (numpy.arange(1, rows + 1, dtype=numpy.float64) ** -exponent).cumsum()
    return numpy.searchsorted(cumulative, generator.random(shape) * cumulative[-1]).astype(numpy.int32)


def deal(
    lines: Sequence[Line],
    encode: Callable[[Line], Iterable[int]],
    tokens: int,
    *,
    ranks: int = RANKS,
    steps: int = STEPS,
) -> numpy.ndarray:
    """Ids `[ranks, steps, tokens]`: rank r reads from its r-th part of the lines on, its batches one after another.

    Raises:
        ValueError: If a part is too short for so many batches.
    """
    drawn = numpy.empty((ranks, steps, tokens), numpy.int32)
    for rank in range(ranks):
        part = lines[len(lines) * rank // ranks : len(lines) * (rank + 1) // ranks]
        ids = chain.from_iterable(encode(line) for line in part)
        filled = numpy.fromiter((token for token, _ in zip(ids, range(steps * tokens), strict=False)), numpy.int32)
        if len(filled) < steps * tokens:
            raise ValueError(f"rank {rank}'s part of the text has {len(filled)} tokens, expected {steps * tokens}")
        drawn[rank] = filled.reshape(steps, tokens)
    return drawn


def _one_table(name: str, text: Text, rows: int, width: int, drawn: numpy.ndarray, about: str) -> Workload:
    source = " (the repository's sample)" if text.suffix else ""
    return Workload(name + text.suffix, (TableShape("table", rows, width),), (drawn,), about + source)


def _lines(path: Path) -> list[str]:
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode().splitlines()


def _cached(path: Path, learn: Callable[[], Tokenizer]) -> Tokenizer:
    if not path.exists():
        learn().save(str(path))
    return Tokenizer.from_file(str(path))


def _learn_subwords(sentences: Iterable[str], size: int) -> Tokenizer:
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    vocabulary.train_from_iterator(sentences, trainer)
    return vocabulary


def _learn_pieces(lines: Iterable[str], size: int) -> Tokenizer:
    vocabulary = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    vocabulary.normalizer = normalizers.BertNormalizer(lowercase=True)
    vocabulary.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    vocabulary.train_from_iterator(lines, trainer)
    return vocabulary
