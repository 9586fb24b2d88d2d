"""The translation example: errors that name the line, batches that do not depend on the ranks, a search that is one."""

import importlib
import lzma
import math
import random
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tulle.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def text() -> Any:
    return _example("parallel_text")


@pytest.fixture(scope="module")
def transformer() -> Any:
    return _example("transformer")


@pytest.fixture(scope="module")
def translate() -> Any:
    return _example("01_translate")


def _example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def _pairs(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(seed)
    lengths = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(count)]
    return [([number] * source, [1, *[number] * target, 2]) for number, (source, target) in enumerate(lengths)]


# Reading


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected at least one line of text"),
        (b"one\teins\ntwo zwei\n", "line 2 has no tab: 'two zwei'; expected source<TAB>target"),
        (b"one\teins\n\tzwei\n", "line 2 has an empty source; expected text on both sides"),
        (b"one\teins\ntwo\t \n", "line 2 has an empty target; expected text on both sides"),
        (b"one\teins\nfive\tf\xfcnf\n", "is not UTF-8: byte 0xfc at offset 15, in line 2"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_by_its_line(text: Any, tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "text.tsv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        text.read_pairs(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_told_with_where_it_was_looked_for(text: Any, tmp_path: Path):
    with pytest.raises(DataError, match=re.escape(f"nothing.tsv does not exist (looked in {tmp_path})")):
        text.read_pairs(str(tmp_path / "nothing.tsv"))


def test_a_folder_is_no_text(text: Any, tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        text.read_pairs(str(tmp_path))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-20], lambda _: b"not compressed at all"])
def test_a_damaged_xz_file_is_told(text: Any, tmp_path: Path, damage: Any):
    path = tmp_path / "text.tsv.xz"
    path.write_bytes(damage(lzma.compress(b"one\teins\n" * 100)))
    with pytest.raises(DataError, match=r"is not a whole \.xz file"):
        text.read_pairs(str(path))


def test_two_files_of_different_length_are_told_with_both_counts(text: Any, tmp_path: Path):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one\ntwo\nthree\n", encoding="utf-8")
    target.write_text("eins\nzwei\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.en has 3 lines and .*a\.de has 2; expected line N"):
        text.read_pairs(f"{source},{target}")


def test_three_files_are_refused(text: Any):
    with pytest.raises(DataError, match="names 3 files; expected one TSV, or two aligned files"):
        text.read_pairs("a,b,c")


def test_a_tsv_and_two_files_and_their_compressed_twins_read_alike(text: Any, tmp_path: Path):
    pairs = [("one line", "eine Zeile"), ("a \u2028 in it", "ein \u2028 darin"), ("three", "drei")]
    sides = ["".join(f"{line}\n" for line in side) for side in zip(*pairs, strict=True)]
    (tmp_path / "plain.tsv").write_text("".join(f"{s}\t{t}\tfrom here\r\n" for s, t in pairs), encoding="utf-8-sig")
    (tmp_path / "packed.tsv.xz").write_bytes(lzma.compress((tmp_path / "plain.tsv").read_bytes()))
    for name, side in zip(("a.en", "a.de"), sides, strict=True):
        (tmp_path / name).write_text(side, encoding="utf-8")
    for files in ("plain.tsv", "packed.tsv.xz"):
        assert text.read_pairs(str(tmp_path / files)) == pairs
    assert text.read_pairs(f"{tmp_path / 'a.en'},{tmp_path / 'a.de'}") == pairs


# Holding out


def test_no_source_is_both_trained_on_and_held_out(text: Any):
    pairs = [(f"Sentence {number % 500}", f"Satz {number}") for number in range(1000)]
    pairs += [(source.upper(), target) for source, target in pairs]
    kept, held_out = text.hold_out(pairs, 20)
    assert sorted(kept + held_out) == sorted(pairs)
    sources = {source.casefold() for source, _ in held_out}
    assert len(sources) == 20
    assert not sources & {source.casefold() for source, _ in kept}


def test_what_is_held_out_does_not_depend_on_the_order_of_the_text(text: Any):
    pairs = [(f"Sentence {number}", f"Satz {number}") for number in range(300)]
    assert text.hold_out(pairs, 10)[1] == text.hold_out(pairs[::-1], 10)[1]


def test_one_sentence_cannot_be_split(text: Any):
    with pytest.raises(DataError, match="1 different source sentences cannot be split"):
        text.hold_out([("one", "eins"), ("One", "ein")], 5)


# Vocabulary


def test_the_vocabulary_is_the_same_each_time_and_gives_text_back(text: Any):
    pairs = text.read_pairs(str(EXAMPLES / "data" / "libreoffice.en-de.tsv.xz"))[::20]
    first, second = (text.learn_vocabulary(pairs, 600) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 600
    awkward = [("A <pad> stays text", "Größe „5“ \u4e2d"), *pairs[:50]]
    for (source, target), encoded in zip(awkward, text.encode(awkward, first), strict=True):
        assert text.PAD not in encoded[0] + encoded[1]
        assert (encoded[0][-1], encoded[1][0], encoded[1][-1]) == (text.END, text.BEGIN, text.END)
        assert [first.decode(ids).strip() for ids in encoded] == [source, target]


# Batches


def test_batches_keep_the_token_count_and_lose_nothing(text: Any):
    pairs = _pairs(500)
    batches = text.cut(pairs, 200)
    assert sorted(pair for batch in batches for pair in batch) == sorted(pairs)
    counts = [text.count_tokens(batch) for batch in batches]
    assert max(counts) <= 200
    assert sum(counts) == text.count_tokens(pairs)
    assert sum(count > 160 for count in counts) >= len(counts) - 1


def test_a_pair_longer_than_a_batch_is_a_batch(text: Any):
    assert [len(batch) for batch in text.cut(_pairs(30), 1)] == [1] * 30


def test_each_epoch_holds_every_pair_once_in_another_order(text: Any):
    pairs = _pairs(200)
    stream = text.endless_batches(pairs, 150, 1)
    epochs = []
    for _ in range(2):
        epoch: list[Any] = []
        while len(epoch) < len(pairs):
            epoch += next(stream)
        epochs.append(epoch)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(pairs)
    assert epochs[0] != epochs[1]


def test_batches_are_a_function_of_the_seed(text: Any):
    first, second, other = (text.endless_batches(_pairs(200), 150, seed) for seed in (1, 1, 2))
    drawn = [[next(stream) for _ in range(100)] for stream in (first, second, other)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


class _Mesh(dict[str, Any]):
    """What the example asks of a mesh, without processes."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(data=SimpleNamespace(rank=rank, size=size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_mean_over_ranks_of_the_loss_is_that_of_one_process(translate: Any, transformer: Any, size: int):
    torch.manual_seed(0)
    model = _model(transformer).double()
    batch = _pairs(5, seed=3)
    whole = translate.global_loss(model, batch, _Mesh(0, 1))
    shares = [translate.global_loss(model, batch, _Mesh(rank, size)) for rank in range(size)]
    assert torch.stack(shares).mean().item() == pytest.approx(whole.item(), rel=1e-12)
    assert all(share.requires_grad for share in shares), "a rank without pairs must still run backward"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_of_a_batch_lose_nothing_and_are_even(translate: Any, text: Any, size: int):
    for batch in text.cut(_pairs(300), 400):
        shares = [translate.share(batch, _Mesh(rank, size)) for rank in range(size)]
        assert sorted(pair for share in shares for pair in share) == sorted(batch)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


# The model and its search


def _model(transformer: Any, words: int = 12) -> Any:
    options = Namespace(width=16, layers=(1, 2), heads=2, dropout=0.0, label_smoothing=0.1, dense_embeddings=False)
    return transformer.Translator(options, words)


def test_padding_changes_no_loss(transformer: Any):
    torch.manual_seed(0)
    model = _model(transformer).double()
    device = torch.device("cpu")
    sources, targets = [[3, 4, 2], [5, 6, 7, 8, 2]], [[1, 3, 2], [1, 9, 8, 7, 2]]
    together = model(transformer.pad(sources, device), transformer.pad(targets, device))
    apart = [model(torch.tensor([s]), torch.tensor([t])) for s, t in zip(sources, targets, strict=True)]
    assert together.item() == pytest.approx(sum(loss.item() for loss in apart), rel=1e-12)


def test_a_beam_of_one_takes_the_likeliest_token_each_time(transformer: Any):
    """The search keeps keys and values from token to token; here each token is computed from all before it."""
    torch.manual_seed(1)
    model, source = _model(transformer).double().eval(), torch.tensor([[3, 4, 9, 2]])
    with torch.no_grad():
        memory, mask = model.encode(source)
        text = torch.tensor([[1]])
        while text[0, -1] != 2 and text.shape[1] <= 2 * 4 + 5:
            logits = model.projection(model.decode(text, memory, mask)[0][:, -1])
            logits[:, 0] = -math.inf
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=-1)
    assert transformer.beam_search(model, source, beam=1)[0] == text[0, 1:].tolist()


def test_a_beam_as_wide_as_all_texts_finds_the_likeliest(transformer: Any):
    torch.manual_seed(1)
    model, source = _model(transformer, words=6).double().eval(), torch.tensor([[3, 4, 2]])
    found = transformer.beam_search(model, source, beam=200)[0]
    words = (1, 3, 4, 5)
    texts = [[], *[[first] for first in words], *[[first, second] for first in words for second in words]]
    best = max(_score(model, source, [*text, 2]) for text in texts)
    assert _score(model, source, found) >= best - 1e-9


def _score(model: Any, source: torch.Tensor, text: list[int]) -> float:
    text = text[: text.index(2) + 1] if 2 in text else text
    with torch.no_grad():
        return -model(source, torch.tensor([[1, *text]])).item() / len(text)


def test_the_search_gives_each_sentence_what_it_gets_alone(transformer: Any):
    torch.manual_seed(2)
    model = _model(transformer).double().eval()
    sources = [[3, 4, 2], [5, 6, 7, 8, 9, 2], [10, 2]]
    together = transformer.beam_search(model, transformer.pad(sources, torch.device("cpu")), beam=3)
    for source, found in zip(sources, together, strict=True):
        alone = transformer.beam_search(model, torch.tensor([source]), beam=3)[0]
        assert found[: len(alone)][: 2 * len(source)] == alone[: 2 * len(source)]


# The schedule


def test_the_learning_rate_rises_falls_with_the_root_and_ends_at_zero(translate: Any):
    options = Namespace(learning_rate=1.0, warmup=100, steps=1000)
    assert translate.learning_rate(50, options) == 0.5
    assert translate.learning_rate(400, options) == 0.5
    assert translate.learning_rate(1000, options) == pytest.approx(math.sqrt(0.1) / 400)
