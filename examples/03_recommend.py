"""Trains DeepFM to tell which advertisements are clicked, on generated clicks, and measures it in AUC.

tulle run --processes 4 examples/03_recommend.py                     # 26 tables, split over four processes
tulle run --processes 4 examples/03_recommend.py --plan allgather    # a whole copy of each table on every process
python examples/03_recommend.py                                      # one process: the same clicks, the same losses

Source: Guo et al., *DeepFM: A Factorization-Machine based Neural Network for CTR Prediction* (IJCAI'17).
"""

import argparse
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tulle

Batch = tuple[Tensor, Tensor, Tensor]
"""Row numbers `[samples, 26]`, numbers `[samples, 13]`, whether it was clicked `[samples]`."""

# Criteo's display-advertising challenge, whose features are 26 categories and 13 numbers, as DLRM counts them.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUMBERS = 13


class Clicks:
    """An endless stream of impressions, each drawn from its number: any share of them is the same on all ranks.

    Few categories are met often and most of them hardly ever, as in real clicks. Whether one is clicked depends on its
    categories, on what pairs of them have in common, and on its numbers; nobody could foresee it better than `truth`.
    """

    def __init__(self, rows: list[int], seed: int) -> None:
        self.rows, self.seed = torch.tensor(rows), seed
        drawn = torch.Generator().manual_seed(seed)
        kinds, width = 199, 4  # categories of one kind are alike
        self.tastes = torch.randn(len(rows), kinds, width, generator=drawn) / math.sqrt(len(rows))
        self.leanings = torch.randn(len(rows), kinds, generator=drawn) / math.sqrt(len(rows))
        self.slopes = torch.randn(NUMBERS, generator=drawn) / math.sqrt(NUMBERS)

    def draw(self, batch: int, samples: int) -> Batch:
        drawn = torch.Generator().manual_seed(1_000_003 * self.seed + batch)
        uniform = torch.rand(samples, len(self.rows), dtype=torch.float64, generator=drawn)
        ids = ((self.rows + 1.0) ** uniform).long().sub_(1).minimum(self.rows - 1)  # Zipf's law
        numbers = torch.randn(samples, NUMBERS, generator=drawn)
        return ids, numbers, torch.bernoulli(self.truth(ids, numbers).sigmoid(), generator=drawn)

    def truth(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """The logit of each sample's chance to be clicked, `[samples]`, on the CPU."""
        features, kinds = torch.arange(len(self.rows)), ids.cpu() % self.tastes.shape[1]
        pairs = factorization(self.tastes[features, kinds])
        return 1.5 * self.leanings[features, kinds].sum(1) + pairs + numbers.cpu() @ self.slopes - 1.0


class DeepFM(nn.Module):
    """A factorization machine and a network over the same vectors; of each row the first number is its own weight."""

    def __init__(self, rows: list[int], width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 1 + width, sparse=True) for count in rows)
        for table in self.tables.children():
            nn.init.normal_(table.get_parameter("weight"), std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(len(rows) * width + NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.click = nn.Linear(hidden + NUMBERS, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:  # [samples, features] and [samples, NUMBERS]
        found = torch.stack([table(ids[:, feature]) for feature, table in enumerate(self.tables)], dim=1)
        own, vectors = found[..., 0], found[..., 1:]
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], dim=1))
        return own.sum(1) + factorization(vectors) + self.click(torch.cat([deep, numbers], dim=1)).squeeze(1)


def factorization(vectors: Tensor) -> Tensor:
    """The sum of the products of all pairs of vectors, `[samples, features, width]` to `[samples]`."""
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


def main() -> None:
    options = parse()
    rows = [min(count, options.most_rows) for count in CARDINALITIES]
    clicks = Clicks(rows, options.seed)
    mesh = tulle.init(data=-1)
    options.batch, options.valid = max(options.batch, mesh.size), max(options.valid, mesh.size)
    torch.manual_seed(options.seed)
    with tulle.deferred_init():  # a process never holds more of a table than its part
        model = DeepFM(rows, options.width, options.hidden)
    model, optimizers = tulle.distribute(model, make_optimizers(model, options), mesh, plan=options.plan)
    for step, (ids, numbers, clicked) in enumerate(tulle.lookahead(batches(clicks, options, mesh)), start=1):
        losses = F.binary_cross_entropy_with_logits(model(ids, numbers), clicked, reduction="sum")
        loss = losses * (mesh.size / options.batch)  # of which the mean over ranks is taken
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tulle.log(loss=loss.detach(), tokens=len(clicked), total_steps=options.steps)
        if step % options.valid_every == 0 or step == options.steps:
            measured, possible = validate(model, clicks, options, mesh)
            tulle.log(valid_auc=measured)
            if mesh.rank == 0:
                print(f"step {step} of {options.steps}: AUC {measured:.4f}, at best {possible:.4f}", flush=True)


def make_optimizers(model: DeepFM, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Adam; for the tables, of which a step reads few rows, its sparse twin, which leaves the others alone."""
    tables, others = model.tables.parameters(), [*model.deep.parameters(), *model.click.parameters()]
    return [torch.optim.SparseAdam(tables, options.learning_rate), torch.optim.Adam(others, options.learning_rate)]


def batches(clicks: Clicks, options: argparse.Namespace, mesh: tulle.Mesh) -> Iterator[Batch]:
    """This rank's share of each step's samples."""
    for step in range(1, options.steps + 1):
        yield share(clicks.draw(step, options.batch), mesh)


def share(batch: Batch, mesh: tulle.Mesh) -> Batch:
    ids, numbers, clicked = (part[mesh.rank :: mesh.size].to(mesh.device) for part in batch)
    return ids, numbers, clicked


@torch.no_grad()
def validate(model: DeepFM, clicks: Clicks, options: argparse.Namespace, mesh: tulle.Mesh) -> tuple[float, float]:
    """The AUC on samples that are not trained on, and that of the truth; the same on every rank."""
    model.eval()
    ids, numbers, clicked = share(clicks.draw(0, options.valid), mesh)
    parts: list[Tensor] = [torch.empty(0)] * mesh.size
    dist.all_gather_object(parts, torch.stack([model(ids, numbers).cpu(), clicks.truth(ids, numbers), clicked.cpu()]))
    model.train()
    scores, truth, labels = torch.cat(parts, dim=1)
    return auc(scores, labels), auc(truth, labels)


def auc(scores: Tensor, labels: Tensor) -> float:
    """How often a sample that was clicked has a higher score than one that was not; ties count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    below = counts.cumsum(0) - (counts - 1) / 2  # the mean rank of equal scores, from 1 on
    clicked, others = labels.sum().item(), (1 - labels).sum().item()
    ranks = below.double()[place][labels.bool()].sum().item()
    return (ranks - clicked * (clicked + 1) / 2) / (clicked * others)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--most-rows", type=int, default=100_000, help="of a table; Criteo's largest has 10 million (%(default)s)")
    add("--width", type=int, default=15, help="numbers of a category's vector (%(default)s)")
    add("--hidden", type=int, default=64, help="units of each layer of the network (%(default)s)")
    add("--plan", default="rows", help="how tables are kept: rows, columns, auto, a scheme, a plan.json (%(default)s)")
    add("--batch", type=int, default=2048, help="samples a step, of all ranks together (%(default)s)")
    add("--steps", type=int, default=300, help="training steps (%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="of Adam and of SparseAdam (%(default)s)")
    add("--valid", type=int, default=20_000, help="samples to measure on (%(default)s)")
    add("--valid-every", type=int, default=100, help="steps between two measurements (%(default)s)")
    add("--seed", type=int, default=1, help="of the clicks and of initial parameters (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
