"""The five examples as jobs of one shape: a model, its optimizers, and a batch for each rank and step.

Batches grow with the ranks: each has what one process has alone.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORK = EXAMPLES.parent / "runs" / "forecast"
STEPS = 24
"""Batches that differ; then they come again."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        make: Gives the model and its optimizers, alike on every rank.
        batch: Gives one rank's batch of a step, as the model is called with it.
        loss: From the model's result to this rank's loss.
        joins: Whether batches of several ranks can be one, as stages want them.
    """

    make: Callable[[], tuple[nn.Module, list[Optimizer]]]
    batch: Callable[[int, int], object]
    loss: Callable[[Any], Tensor]
    joins: bool = False

    def join(self, batches: Sequence[Any]) -> object:
        """Batches of several ranks as one: mappings of tensors."""
        return {name: torch.cat([one[name] for one in batches]) for name in batches[0]}


def translate(ranks: int) -> Job:
    """Example 01: an encoder-decoder Transformer with two sparse tables."""
    example = load("01_translate")
    text = example.parallel_text
    options = parsed(example)
    pairs = text.read_pairs(options.train)
    vocabulary = subwords(text, pairs, options.vocabulary)
    options.tokens_per_batch *= ranks
    endless = text.endless_batches(text.encode(pairs, vocabulary), options.tokens_per_batch, options.seed)
    batches = list(itertools.islice(endless, STEPS))

    def make() -> tuple[nn.Module, list[Optimizer]]:
        model = example.Translator(options, vocabulary.get_vocab_size())
        return model, example.make_optimizers(model)

    def batch(rank: int, step: int) -> object:
        sources, targets = zip(*batches[step % STEPS][rank::ranks], strict=True)
        cpu = torch.device("cpu")
        return example.pad(sources, cpu), example.pad(targets, cpu)

    return Job(make, batch, lambda loss: loss / options.tokens_per_batch * ranks)


def language_model(ranks: int) -> Job:
    """Example 02: an LSTM with a sampled softmax over a sparse table."""
    example = load("02_language_model")
    options = parsed(example, "--softmax", "sampled", "--plan", "auto")
    lines = example.word_text.read_lines(options.train)
    vocabulary = example.word_text.learn_vocabulary(lines, options.min_count)
    windows = example.word_text.windows(lines, vocabulary, options.length)
    drawn = torch.Generator().manual_seed(options.seed)
    chosen = torch.randint(len(windows), (STEPS, ranks, options.batch), generator=drawn)
    draw = example.LanguageModel(options, len(vocabulary)).softmax.sampler.draw

    def make() -> tuple[nn.Module, list[Optimizer]]:
        model = example.LanguageModel(options, len(vocabulary))
        return model, example.make_optimizers(model, options)

    def batch(rank: int, step: int) -> object:
        some = windows[chosen[step % STEPS, rank]]
        return some[:, :-1].contiguous(), some[:, 1:].contiguous(), draw(step % STEPS)

    return Job(make, batch, lambda loss: loss / (options.batch * options.length))


def recommend(ranks: int) -> Job:
    """Example 03: DeepFM over 26 tables."""
    example = load("03_recommend")
    options = parsed(example)
    rows = [min(count, options.most_rows) for count in example.CARDINALITIES]
    clicks = example.Clicks(rows, options.seed)

    def make() -> tuple[nn.Module, list[Optimizer]]:
        model = example.DeepFM(rows, options.width, options.hidden)
        return model, example.make_optimizers(model, options)

    def batch(rank: int, step: int) -> object:
        return clicks.draw(1 + (step % STEPS) * ranks + rank, options.batch)[:2]

    # Whether it was clicked makes no difference to what a step takes.
    return Job(make, batch, lambda logits: F.binary_cross_entropy_with_logits(logits, (logits > 0).float()))


def large_model(ranks: int) -> Job:
    """Example 05: a GPT-2 from its configuration, without sparse tables; its batch is one micro-batch."""
    del ranks
    example = load("05_large_model")
    options = parsed(example, "--batch", "4")
    texts = [source for source, _ in example.parallel_text.read_pairs(str(options.text))]
    batches = list(itertools.islice(example.endless_batches(texts, options), STEPS))

    def make() -> tuple[nn.Module, list[Optimizer]]:
        model = example.build(options)
        return model, [torch.optim.AdamW(model.parameters(), lr=options.learning_rate)]

    def batch(rank: int, step: int) -> object:
        ids = batches[(step + rank) % STEPS]
        return {"input_ids": ids, "labels": ids}

    return Job(make, batch, lambda result: result.loss, joins=True)


JOBS: Mapping[str, Callable[[int], Job]] = {
    "translate": translate,
    "language-model": language_model,
    "recommend": recommend,
    "large-model": large_model,
}


NAMED = "named"
"""Example 04, which is another kind of job: see `layouts.py`."""


def subwords(text: ModuleType, pairs: list[tuple[str, str]], size: int) -> Tokenizer:
    """The vocabulary of the examples, learnt once and kept: it takes longer than most of what is measured here."""
    path = WORK / f"subwords-{size}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        text.learn_vocabulary(pairs, size).save(str(aside))
        aside.replace(path)
    return Tokenizer.from_file(str(path))


def load(name: str) -> ModuleType:
    """An example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None, "the example is there"
    assert spec.loader is not None, "it is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(example: ModuleType, *arguments: str) -> Namespace:
    """The options of an example, as if it were started with some arguments."""
    before = sys.argv
    sys.argv = [example.__name__, *arguments]
    try:
        return example.parse()
    finally:
        sys.argv = before
