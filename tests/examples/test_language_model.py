"""The language model example: its text as numbers, and that ranks and kinds of softmax give the same perplexity."""

import importlib
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tulle
from ranks import run_on_ranks
from tulle.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--steps 6 --valid-every 3 --batch 5 --length 8 --width 16 --samples 40 --valid-windows 7 --dropout 0"


@pytest.fixture(scope="module")
def text() -> Any:
    return _example("word_text")


def _example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "has no words"), (b"\n \n", "has no words"), (b"f\xfcnf", "cannot be used: 'utf-8'")]
)
def test_a_file_that_cannot_be_used_is_told(text: Any, tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{path} {message}")):
        text.read_lines(path)


def test_a_missing_and_a_damaged_file_are_told(text: Any, tmp_path: Path):
    (tmp_path / "text.xz").write_bytes(b"not compressed")
    for name in ("nothing.txt", "text.xz"):
        with pytest.raises(DataError, match=rf"{name} cannot be used: .*Expected text in UTF-8, plain or \.xz"):
            text.read_lines(tmp_path / name)


def test_words_are_what_spaces_separate_or_those_of_a_tsv_and_their_punctuation(text: Any, tmp_path: Path):
    (tmp_path / "text.txt").write_text("it isn't so .\n\n", encoding="utf-8")
    (tmp_path / "text.tsv.xz").write_bytes(lzma.compress("Open it.\tÖffnen Sie es.\n".encode()))
    assert text.read_lines(tmp_path / "text.txt") == [["it", "isn't", "so", "."], []]
    assert text.read_lines(tmp_path / "text.tsv.xz") == [["Open", "it", "."]]


def test_words_are_numbered_by_falling_frequency(text: Any):
    lines = [["b", "a", "b", "rare"], ["b", "a"], ["once"]]
    assert [*text.learn_vocabulary(lines, 2)] == ["<end>", "b", "<unk>", "a"]
    assert [*text.learn_vocabulary(lines, 1)] == ["<end>", "b", "a", "once", "rare", "<unk>"]


def test_windows_lose_no_word_but_the_last_few(text: Any):
    vocabulary = {"<unk>": 0, "<end>": 1, "a": 2, "b": 3}
    windows = text.windows([["a", "b", "c"], ["b", "b", "a", "a"]], vocabulary, 3)
    assert windows.tolist() == [[2, 3, 0, 1], [1, 3, 3, 2]]
    with pytest.raises(DataError, match="the text has 2 words; expected more than --length 3"):
        text.windows([["a"]], vocabulary, 3)


def test_held_out_lines_are_not_trained_on(text: Any):
    lines = [[str(number)] for number in range(100)]
    kept, held_out = text.hold_out(lines, 10)
    assert len(held_out) == 10
    assert sorted(kept + held_out) == sorted(lines)


def perplexities(arguments: str) -> list[float]:
    """What the example measures on this rank."""
    measured: list[float] = []

    def log(**values: Any) -> None:
        measured.extend(values[name] for name in values if name == "valid_perplexity")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["02_language_model.py", *arguments.split()])
        patch.setattr(tulle, "log", log)
        _example("02_language_model").main()
    return measured


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = torch.multinomial(1 / torch.arange(1.0, 80), 6000, replacement=True, generator=torch.manual_seed(1))
    path.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in words.view(-1, 10).tolist()))
    return path


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_all_ranks_and_both_exact_kinds_of_softmax_give_one_perplexity(corpus: Path, model: str):
    common = f"--train {corpus} --model {model} {SMALL}"
    expected = run_on_ranks(1, perplexities, arguments=f"{common} --softmax full --plan auto")[0]
    assert expected[1] < expected[0] < 1000
    for size in (1, 2, 3):
        for measured in run_on_ranks(size, perplexities, arguments=f"{common} --softmax sharded"):
            assert measured == pytest.approx(expected, rel=1e-4)


def test_a_sampled_softmax_learns_alike_on_all_ranks(corpus: Path):
    common = f"--train {corpus} {SMALL} --softmax sampled"
    expected = run_on_ranks(1, perplexities, arguments=common)[0]
    assert expected[1] < expected[0]
    for plan in ("rows", "auto"):
        for measured in run_on_ranks(2, perplexities, arguments=f"{common} --plan {plan}"):
            assert measured == pytest.approx(expected, rel=1e-4)
