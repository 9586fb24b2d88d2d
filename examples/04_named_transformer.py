"""The translation of example 01 in named dimensions: one program, any layout over any mesh, the same loss curve.

tulle run --processes 4 examples/04_named_transformer.py --mesh data=2,model=2 --layout "batch:data, heads:model"
tulle run --processes 4 examples/04_named_transformer.py --mesh data=2,model=2 --layout best
python examples/04_named_transformer.py --explain --mesh data=16,model=32 --batch 256 --width 1024 --heads 32
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import parallel_text
import sacrebleu
import torch
import torch.distributed as dist
from parallel_text import BEGIN, END, PAD, EncodedPair, Pair
from tokenizers import Tokenizer

import tulle
from tulle import named as tn
from tulle.named import layers

STANDARD = "batch:data, heads:model, d_ff:model, vocab:model"
WORDS_ARE_A_MULTIPLE_OF = 128  # so that the vocabulary can be split over any mesh


def main() -> None:
    options = parse()
    pairs, test = parallel_text.hold_out(parallel_text.read_pairs(options.train), 1000)
    mesh = tulle.init(timeout=None, backend=None, **({"data": -1} if options.explain else options.mesh))
    vocabulary = agree_on_vocabulary(pairs, options.vocabulary, mesh)
    dims = Dimensions(options, vocabulary.get_vocab_size())
    model = dims.model(options.layers)
    batches = endless_batches(parallel_text.encode(pairs, vocabulary), options)
    if options.explain:  # on a mesh that need not be there
        batch = next(batches)
        layout = choose_layout(model, dims, batch, options, options.mesh)
        print(tn.explain(model, dims.sample(batch), options.mesh, layout))
        return
    layout = choose_layout(model, dims, next(batches), options, mesh)
    with tn.use(mesh, layout):
        train(model, dims, batches, options, mesh)
        bleu, samples = translate(model, dims, test[: options.test_pairs], vocabulary, options)
    if mesh.rank == 0:
        for source, reference, translation in samples[:8]:
            print(f"{source}\n  reference    {reference}\n  translation  {translation}\n")
        print(f"BLEU {bleu:.1f} on {options.test_pairs} held-out pairs, layout '{layout}'")


class Dimensions:
    """The dimensions of the task; everything else follows from their names."""

    def __init__(self, options: argparse.Namespace, words: int):
        self.batch, self.beam = tn.dims(batch=options.batch, beam=options.beam)
        self.source, self.source_memory = tn.dims(source=options.length, source_memory=options.length)
        self.target, self.target_memory = tn.dims(target=options.length, target_memory=options.length)
        self.widths = layers.Widths(
            *tn.dims(
                d_model=options.width,
                heads=options.heads,
                d_kv=options.width // options.heads,
                d_ff=2 * options.width,
                vocab=math.ceil(words / WORDS_ARE_A_MULTIPLE_OF) * WORDS_ARE_A_MULTIPLE_OF,
            ),
            dropout=options.dropout,
        )

    def model(self, count: tuple[int, int]) -> layers.EncoderDecoder:
        sides = (self.source, self.source_memory), (self.target, self.target_memory)
        return layers.EncoderDecoder(self.widths, count, *sides, pad=PAD)

    def sources(self, sentences: Sequence[Sequence[int]]) -> tn.Tensor:
        return tn.from_torch(padded(sentences, self.batch.size, self.source.size), (self.batch, self.source))

    def written(self, sentences: Sequence[Sequence[int]]) -> tn.Tensor:
        return tn.from_torch(padded(sentences, self.batch.size, self.target.size), (self.batch, self.target))

    def sample(self, pairs: Sequence[EncodedPair]) -> tuple[tn.Tensor, tn.Tensor, tn.Tensor]:
        """What is read, what is written, and what is to be written next."""
        before = [target[:-1] for _, target in pairs]
        after = [target[1:] for _, target in pairs]
        return self.sources([source for source, _ in pairs]), self.written(before), self.written(after)


def padded(sentences: Sequence[Sequence[int]], count: int, length: int) -> torch.Tensor:
    """Sentences as rows of one length; rows that are missing are empty sentences."""
    rows = [list(sentence) for sentence in sentences] + [[END]] * (count - len(sentences))
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def endless_batches(pairs: list[EncodedPair], options: argparse.Namespace) -> Iterator[list[EncodedPair]]:
    """Batches of one size, the same on every rank; sentences that are too long are left out."""
    fitting = [pair for pair in pairs if max(map(len, pair)) <= options.length]
    order = random.Random(options.seed)
    while True:
        yield order.sample(fitting, options.batch)


def choose_layout(
    model: layers.EncoderDecoder,
    dims: Dimensions,
    batch: list[EncodedPair],
    options: argparse.Namespace,
    mesh: tulle.Mesh | dict[str, int],
) -> tn.Layout:
    """The layout that was asked for, or the fastest, with what it was weighed against."""
    if options.layout != "best":
        return tn.Layout(options.layout)
    best = tn.best_layout(model, dims.sample(batch), mesh, best=3)
    if not isinstance(mesh, tulle.Mesh) or mesh.rank == 0:
        print(best)
    return best.layout


def train(
    model: layers.EncoderDecoder,
    dims: Dimensions,
    batches: Iterator[list[EncodedPair]],
    options: argparse.Namespace,
    mesh: tulle.Mesh,
) -> list[float]:
    """Train under the layout in force; gives the loss of each step, which does not depend on it."""
    tn.manual_seed(options.seed)
    model.init(options.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        batch = next(batches)
        words = parallel_text.count_tokens(batch)
        loss = tn.sum(model(*dims.sample(batch), label_smoothing=options.label_smoothing)) * (1 / words)
        loss.backward()
        tn.clip_grad_norm(model, max_norm=0.5)
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tulle.log(loss=losses[-1], tokens=words if mesh.rank == 0 else 0, total_steps=options.steps)
        if mesh.rank == 0 and (step % options.print_every == 0 or step == options.steps):
            print(f"step {step} of {options.steps}: loss {losses[-1]:.6f} a word", flush=True)
    return losses


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rise for `warmup` steps, then fall with the inverse square root, and to zero at the end."""
    cooldown = min(1.0, (1 + options.steps - step) / (0.4 * options.steps))
    return options.learning_rate * min(step / options.warmup, math.sqrt(options.warmup / step)) * cooldown


def translate(
    model: layers.EncoderDecoder,
    dims: Dimensions,
    pairs: list[Pair],
    vocabulary: Tokenizer,
    options: argparse.Namespace,
) -> tuple[float, list[tuple[str, str, str]]]:
    """Translate all sources by beam search; the BLEU, and each source, reference and translation."""
    model.eval()
    sources = [source[: options.length - 1] for source, _ in parallel_text.encode(pairs, vocabulary)]
    texts: list[str] = []
    for first in range(0, len(sources), options.batch):
        some = sources[first : first + options.batch]
        found = layers.beam_search(model, dims.sources(some), dims.beam, begin=BEGIN, end=END)
        rows = tn.to_torch(found).tolist()[: len(some)]
        texts += vocabulary.decode_batch([row[: [*row, END].index(END)] for row in rows])
    texts = [text.strip() for text in texts]
    bleu = sacrebleu.corpus_bleu(texts, [[target for _, target in pairs]]).score
    return bleu, [(*pair, text) for pair, text in zip(pairs, texts, strict=True)]


def agree_on_vocabulary(texts: list[Pair], size: int, mesh: tulle.Mesh) -> Tokenizer:
    """Rank 0 learns the subwords, all ranks get the same."""
    learnt = [parallel_text.learn_vocabulary(texts, size).to_str() if mesh.rank == 0 else ""]
    dist.broadcast_object_list(learnt, device=mesh.device)
    return Tokenizer.from_str(learnt[0])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train", default=str(Path(__file__).parent / "data/libreoffice.en-de.tsv.xz"), help="a TSV to learn from")
    add(
        "--mesh",
        type=axes,
        default={"data": 1},
        metavar="AXIS=SIZE,...",
        help="axes of the mesh (data=1); -1 is the rest",
    )
    add("--layout", default=STANDARD, help="rules 'dimension:axis, ...', or 'best' (%(default)s)")
    add("--explain", action="store_true", help="print what each line costs, and stop; one process will do")
    add("--width", type=int, default=96, help="numbers that stand for a word (%(default)s)")
    add("--heads", type=int, default=4, help="attention heads a layer (%(default)s)")
    add("--layers", type=int, nargs=2, default=[1, 2], metavar=("ENCODER", "DECODER"), help="layers a side (1 2)")
    add("--vocabulary", type=int, default=4000, help="subwords of both languages together (%(default)s)")
    add("--batch", type=int, default=64, help="pairs a step, of all ranks together (%(default)s)")
    add("--length", type=int, default=32, help="subwords of a sentence at most (%(default)s)")
    add("--steps", type=int, default=1200, help="training steps (%(default)s)")
    add("--learning-rate", type=float, default=5e-3, help="its peak, after the warm-up (%(default)s)")
    add("--warmup", type=int, default=150, help="steps until the learning rate has risen to its peak (%(default)s)")
    add("--dropout", type=float, default=0.0, help="share of values dropped, the same in every layout (%(default)s)")
    add("--label-smoothing", type=float, default=0.05, help="probability kept for wrong words (%(default)s)")
    add("--beam", type=int, default=4, help="translations kept in the search (%(default)s)")
    add("--test-pairs", type=int, default=256, help="held-out pairs to translate at the end (%(default)s)")
    add("--print-every", type=int, default=50, help="steps between two printed losses (%(default)s)")
    add("--seed", type=int, default=1, help="of initial parameters, batches and dropout (%(default)s)")
    return parser.parse_args(arguments)


def axes(text: str) -> dict[str, int]:
    """`data=2,model=2` as a mapping."""
    return {name.strip(): int(size) for name, size in (axis.split("=") for axis in text.split(","))}


if __name__ == "__main__":
    main()
