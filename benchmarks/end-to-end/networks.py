"""The models that are trained, in plain PyTorch, and what a rank is given in a step. Needs torch and numpy only.

    language model    words -> LSTM ------------------------> sampled softmax over all words
    translation       source -> LSTM -> attention <- LSTM <- target; sampled softmax over all subwords
    recommender       26 categories -> factorization machine + network (DeepFM) <- 13 numbers

A batch is a tuple of tensors, the arguments of the model, whose result is the loss. Everything that is looked up in a
table lies in the batch as one tensor: the rows of an output table are `sought` at once, negatives first, then targets.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import job
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 1.0
WINDOW = 32
"""Words of a line of text that the language model reads."""
SENTENCE = 24
"""Subwords of a sentence, source or target; longer ones are cut."""
PAD = 0
NUMBERS = 13
_PATTERN_ROWS = 1024

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Size:
    """How large a model is, and of how much it is trained at once.

    Args:
        hidden: Units of the LSTM, or of each layer of the recommender's network.
        samples: How often a negative is drawn; each is kept once. 0 where there is no softmax.
    """

    hidden: int
    samples: int = 0


SIZES = {
    "lm-narrow": Size(hidden=64, samples=1024),
    "lm": Size(hidden=128, samples=1024),
    "lm-wide": Size(hidden=512, samples=1024),
    "translation": Size(hidden=128, samples=1024),
    "recommender": Size(hidden=128),
}


def size_of(workload: job.Workload) -> Size:
    """The size that goes with a workload's name."""
    return SIZES[workload.name.removesuffix("-sample")]


def build_model(workload: job.Workload, *, sparse: bool) -> nn.Module:
    """The model of a workload, with the same parameters on every rank; `sparse` is that of `nn.Embedding`."""
    torch.manual_seed(0)
    size = size_of(workload)
    if workload.name.startswith("recommender"):
        tables = nn.ModuleList(make_table(table.num_rows, table.width, sparse=sparse) for table in workload.tables)
        return Recommender(tables, DeepFM(len(workload.tables), workload.tables[0].width - 1, size.hidden))
    network = Translator if workload.name.startswith("translation") else LanguageModel
    return network([make_table(table.num_rows, table.width, sparse=sparse) for table in workload.tables], size)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: its numbers are the same for dense and sparse gradients, and it adds least to what is compared."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE)


def batch(workload: job.Workload, rank: int, number: int) -> Batch:
    """What a rank is given in a step, as the arguments of the model."""
    ids = workload.ids(rank, number)
    if workload.name.startswith("recommender"):
        generator = torch.Generator().manual_seed(1 + 1000 * number + rank)
        numbers = torch.randn(len(ids[0]), NUMBERS, generator=generator)
        return torch.stack(ids, dim=1), numbers, torch.bernoulli(numbers[:, 0].sigmoid(), generator=generator)
    negatives = draw(workload.tables[-1].num_rows, size_of(workload).samples, number)
    if workload.name.startswith("translation"):
        source, target = (side.view(-1, SENTENCE) for side in ids[:2])
        return source, target[:, :-1].contiguous(), torch.cat([negatives, target[:, 1:].flatten()])
    return ids[0].view(-1, WINDOW), torch.cat([negatives, ids[1]])


def units(workload: job.Workload) -> int:
    """Of what throughput is told, on one rank and step: samples of a recommender, else target tokens."""
    count = workload.drawn[-1].shape[-1]
    return count // SENTENCE * (SENTENCE - 1) if workload.name.startswith("translation") else count


class LanguageModel(nn.Module):
    """Words in, the mean loss of the words that follow out (Jozefowicz et al., 2016, of one layer and small)."""

    def __init__(self, tables: Sequence[nn.Embedding], size: Size) -> None:
        super().__init__()
        self.words, self.output = tables
        width = self.words.embedding_dim
        self.cells = nn.LSTM(width, size.hidden, batch_first=True)
        self.projection = nn.Linear(size.hidden, width)
        self.samples = size.samples

    def forward(self, text: Tensor, sought: Tensor) -> Tensor:  # [lines, WINDOW], [negatives + lines * WINDOW]
        states = self.projection(self.cells(self.words(text))[0])
        return sampled_loss(states.flatten(0, 1), sought, self.output, self.samples).mean()


class Translator(nn.Module):
    """Source and target in, the mean loss of the target's tokens out: Luong et al. (2015), of one layer and small."""

    def __init__(self, tables: Sequence[nn.Embedding], size: Size) -> None:
        super().__init__()
        self.source, self.target, self.output = tables
        width = self.source.embedding_dim
        self.encoder = nn.LSTM(width, size.hidden, batch_first=True)
        self.decoder = nn.LSTM(width, size.hidden, batch_first=True)
        self.projection = nn.Linear(2 * size.hidden, width)
        self.samples = size.samples

    def forward(self, source: Tensor, target: Tensor, sought: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        states = self.decoder(self.target(target), last)[0]
        weights = states @ memory.transpose(1, 2)
        weights = weights.masked_fill((source == PAD)[:, None, :], -math.inf).softmax(-1)
        states = self.projection(torch.cat([states, weights @ memory], dim=-1).tanh())
        losses = sampled_loss(states.flatten(0, 1), sought, self.output, self.samples)
        is_word = sought[-len(losses) :] != PAD
        return (losses * is_word).sum() / losses.numel()


class DeepFM(nn.Module):
    """From the vectors of the categories and the numbers to the logit of a click (Guo et al., 2017)."""

    def __init__(self, features: int, width: int, hidden: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(features * width + NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.click = nn.Linear(hidden + NUMBERS, 1)

    def forward(self, found: Tensor, numbers: Tensor) -> Tensor:  # [samples, features, 1 + width], [samples, NUMBERS]
        own, vectors = found[..., 0], found[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], dim=1))
        return own.sum(1) + pairs + self.click(torch.cat([deep, numbers], dim=1)).squeeze(1)


class Recommender(nn.Module):
    """DeepFM over a table a feature; categories, numbers and clicks in, the mean loss out."""

    def __init__(self, tables: nn.ModuleList, network: DeepFM) -> None:
        super().__init__()
        self.tables = tables
        self.network = network

    def forward(self, ids: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
        found = torch.stack([table(ids[:, feature]) for feature, table in enumerate(self.tables)], dim=1)
        return F.binary_cross_entropy_with_logits(self.network(found, numbers), clicked)


def make_table(rows: int, width: int, *, sparse: bool) -> nn.Embedding:
    """A table whose rows repeat after a while: to draw 136 million normal numbers on every rank would take minutes."""
    pattern = torch.randn(min(_PATTERN_ROWS, rows), width) * 0.05
    weight = pattern.repeat(-(-rows // len(pattern)), 1)[:rows]
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=sparse)


def draw(rows: int, times: int, number: int) -> Tensor:
    """Distinct rows, ascending, drawn log-uniformly, the same on all ranks: a function of the step's number."""
    generator = torch.Generator().manual_seed(7 + number)
    drawn = torch.exp(torch.rand(times, dtype=torch.float64, generator=generator) * math.log(rows + 1)).long() - 1
    return torch.unique(drawn.clamp_(0, rows - 1))


def sampled_loss(states: Tensor, sought: Tensor, output: nn.Embedding, times: int) -> Tensor:
    """`[tokens]` cross entropies over the negatives and each token's own target (Jean et al., 2015, section 3)."""
    found, negatives = output(sought), len(sought) - len(states)
    chance = log_chance(sought, output.num_embeddings, times)
    logits = states @ found[:negatives].T - chance[:negatives]
    wanted = (states * found[negatives:]).sum(1) - chance[negatives:]
    is_drawn = torch.isin(sought[negatives:], sought[:negatives])
    return torch.logaddexp(logits.logsumexp(1), wanted.masked_fill(is_drawn, -math.inf)) - wanted


def log_chance(rows: Tensor, num_rows: int, times: int) -> Tensor:
    """The logarithm of the probability that `draw` draws each row."""
    once = torch.log1p(1 / (rows.double() + 1)) / math.log(num_rows + 1)
    return torch.log(-torch.expm1(times * torch.log1p(-once))).float()
