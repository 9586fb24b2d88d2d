"""Trains a language model on words, with all of them in its softmax, and measures it in perplexity.

tulle run --processes 4 examples/02_language_model.py                       # tables split over four processes
tulle run --processes 4 examples/02_language_model.py --softmax sampled     # scored against a sample of the words
python examples/02_language_model.py --softmax full --plan auto             # plain PyTorch, on one process
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import word_text
from torch import Tensor, nn

import tulle

IGNORED = -100


class LanguageModel(nn.Module):
    """Words in, the summed loss of the words that follow out."""

    def __init__(self, options: argparse.Namespace, words: int):
        super().__init__()
        width = options.width
        self.words = nn.Embedding(words, width, sparse=options.softmax == "sampled")
        nn.init.normal_(self.words.weight, std=width**-0.5)
        self.body = LSTM(width, options.layers) if options.model == "lstm" else Transformer(width, options.layers)
        self.dropout = nn.Dropout(options.dropout)
        self.softmax: tulle.SampledSoftmax | tulle.ShardedSoftmax | None = None
        if options.softmax == "sampled":
            self.softmax = tulle.SampledSoftmax(
                self.words, samples=options.samples, ignore_index=IGNORED, reduction="sum"
            )
        elif options.softmax == "sharded":
            self.softmax = tulle.ShardedSoftmax(weight=self.words.weight, ignore_index=IGNORED, reduction="sum")

    def forward(self, text: Tensor, target: Tensor, *negatives: Tensor) -> Tensor:  # [windows, length] each
        hidden = self.dropout(self.body(self.dropout(self.words(text) * math.sqrt(self.words.embedding_dim))))
        if self.softmax is not None:
            return self.softmax(hidden, target, *negatives)
        logits = F.linear(hidden, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")


class LSTM(nn.Module):
    """A recurrent network that reads from left to right."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.cells = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, state: Tensor) -> Tensor:
        return self.cells(state)[0]


class Transformer(nn.Module):
    """Attention that looks back only, with a learned vector for each position."""

    def __init__(self, width: int, layers: int, longest: int = 1024):
        super().__init__()
        heads = width // 64 or 1
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.positions = nn.Parameter(torch.randn(longest, width) * 0.1)

    def forward(self, state: Tensor) -> Tensor:
        length = state.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, state.device, state.dtype)
        return self.layers(state + self.positions[:length], mask, is_causal=True)


def main() -> None:
    options = parse()
    # Files that cannot be used are found out here, on every rank, before the first message.
    lines = word_text.read_lines(options.train)
    train_lines, valid_lines = (
        word_text.hold_out(lines, 500) if options.valid is None else (lines, word_text.read_lines(options.valid))
    )
    vocabulary = word_text.learn_vocabulary(train_lines, options.min_count)
    train = word_text.windows(train_lines, vocabulary, options.length)
    valid = word_text.windows(valid_lines, vocabulary, options.length)[: options.valid_windows]

    mesh = tulle.init(data=-1)
    options.batch = max(options.batch, mesh.size)
    torch.manual_seed(options.seed)
    model = LanguageModel(options, len(vocabulary)).to(mesh.device)
    model, optimizers = tulle.distribute(model, make_optimizers(model, options), mesh, plan=options.plan)
    torch.manual_seed(options.seed + mesh.rank)  # the ranks' models start alike; what they drop out differs
    draw = model.softmax.sampler.draw if isinstance(model.softmax, tulle.SampledSoftmax) else None
    for step, batch in enumerate(tulle.lookahead(batches(train, draw, options, mesh)), start=1):
        model.train()
        loss = model(*batch) * (mesh.size / (options.batch * options.length))  # of which the mean over ranks is taken
        loss.backward()
        rate = min(1.0, step / options.warmup, (1 + options.steps - step) / (0.5 * options.steps))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate
            optimizer.step()
            optimizer.zero_grad()
        tulle.log(loss=loss.detach(), tokens=batch[1].numel(), total_steps=options.steps)
        if step % options.valid_every == 0 or step == options.steps:
            perplexity = validate(model, valid, options, mesh)
            tulle.log(valid_perplexity=perplexity)
            if mesh.rank == 0:
                print(
                    f"step {step} of {options.steps}: {len(vocabulary):,} words, perplexity {perplexity:.1f}",
                    flush=True,
                )


def make_optimizers(model: LanguageModel, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Adam; for a table whose gradient has few rows its sparse twin, which leaves the other rows alone."""
    if not model.words.sparse:
        return [torch.optim.Adam(model.parameters(), lr=options.learning_rate)]
    others = [parameter for parameter in model.parameters() if parameter is not model.words.weight]
    return [torch.optim.Adam(others), torch.optim.SparseAdam([model.words.weight])]


def batches(
    windows: Tensor, draw: Callable[[int], Tensor] | None, options: argparse.Namespace, mesh: tulle.Mesh
) -> Iterator[tuple[Tensor, ...]]:
    """This rank's share of each step's windows, as text and what follows; and the negatives, which all ranks share."""
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        chosen = windows[torch.randint(len(windows), (options.batch,), generator=generator)]
        share = chosen[mesh.rank :: mesh.size].to(mesh.device)
        negatives = [draw(step).to(mesh.device)] if draw is not None else []
        yield share[:, :-1].contiguous(), share[:, 1:].contiguous(), *negatives


@torch.no_grad()
def validate(model: LanguageModel, windows: Tensor, options: argparse.Namespace, mesh: tulle.Mesh) -> float:
    """The perplexity of all words of the windows, exact; the same on every rank."""
    model.eval()
    total = torch.zeros((), device=mesh.device)
    for some in windows.split(options.batch):
        share = some[mesh.rank :: mesh.size].to(mesh.device)
        text, target = share[:, :-1], share[:, 1:]
        if not len(share):  # a rank that has none stays in step
            text, target = some[:1, :-1].to(mesh.device), torch.full_like(some[:1, 1:], IGNORED, device=mesh.device)
        total += model(text, target)
    words = windows.shape[0] * (windows.shape[1] - 1)
    return math.exp(tulle.sync.all_reduce(total, mesh["data"]).item() * mesh.size / words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, text = parser.add_argument, "words separated by spaces, or the first column of a TSV; plain or .xz"
    add("--train", type=Path, default=Path(__file__).parent / "data/libreoffice.en-de.tsv.xz", help=f"{text}")
    add("--valid", type=Path, help="to measure on (default: 500 lines taken out of --train)")
    add("--valid-windows", type=int, default=200, help="measure on so many windows of it (%(default)s)")
    add("--valid-every", type=int, default=100, help="steps between two measurements (%(default)s)")
    add("--min-count", type=int, default=1, help="words that occur less often are one word (%(default)s)")
    add("--model", choices=["lstm", "transformer"], default="lstm", help="what is between the words (%(default)s)")
    add("--softmax", choices=["full", "sharded", "sampled"], default="sharded", help="(%(default)s)")
    add("--samples", type=int, default=2048, help="draws of negatives of the sampled softmax (%(default)s)")
    add("--plan", default="rows", help="how tables are kept: rows, columns, auto, a scheme, a plan.json (%(default)s)")
    add("--width", type=int, default=128, help="numbers that stand for a word (%(default)s)")
    add("--layers", type=int, default=1, help="of the LSTM or Transformer (%(default)s)")
    add("--dropout", type=float, default=0.1, help="share of values dropped (%(default)s)")
    add("--length", type=int, default=32, help="words of a window (%(default)s)")
    add("--batch", type=int, default=32, help="windows a step, of all ranks together, at least one each (%(default)s)")
    add("--steps", type=int, default=400, help="training steps (%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="its peak (%(default)s)")
    add("--warmup", type=int, default=40, help="steps until it is reached (%(default)s)")
    add("--seed", type=int, default=1, help="of initial parameters, batches and dropout (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
