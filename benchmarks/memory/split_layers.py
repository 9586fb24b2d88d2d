"""Split layers against DTensor's `parallelize_module`: `python benchmarks/memory/split_layers.py --ranks 2`.

Both train the same model, some steps of each in turn and in changing order; ratios are of turns that stand beside each
other. Writes `split_layers.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from spawned import compare, in_turns, write_row
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import tulle
from tulle import tensor_parallel

HERE = Path(__file__).parent
WARM_TURNS = 1


class Block(nn.Module):
    """A norm and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        """`[samples, length, 256]` to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class FeedForward:
    """Four blocks of a norm and a feed-forward network, width 256, batches of 8 x 64."""

    columns, rows = ("up",), ("down",)

    def model(self) -> nn.Module:
        """The same weights whenever it is called."""
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(4)])

    def loss(self, model: nn.Module) -> Tensor:
        """Of one batch."""
        return model(torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(1))).pow(2).mean()


class Llama:
    """Four layers as transformers wrote them, width 256, 8 heads, batches of 8 x 64, 2,000 words."""

    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")

    def model(self) -> nn.Module:
        """The same weights whenever it is called."""
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=2000, hidden_size=256, intermediate_size=688, num_hidden_layers=4)
        config.num_attention_heads = config.num_key_value_heads = 8
        config.head_dim, config.use_cache = 32, False
        return LlamaForCausalLM(config)

    def loss(self, model: nn.Module) -> Tensor:
        """Of one batch."""
        ids = torch.randint(2000, (8, 64), generator=torch.Generator().manual_seed(1))
        return model(input_ids=ids, labels=ids).loss


MODELS = {"feed_forward": FeedForward(), "llama": Llama()}


def run(rank: int, ranks: int, name: str, turns: int, folder: str) -> None:
    """Train both ways in turn; rank 0 writes what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = tulle.init(model=ranks)
    what = MODELS[name]
    ours, theirs = what.model(), what.model()
    choice = {f"*.{layer}": "column" for layer in what.columns} | {f"*.{layer}": "row" for layer in what.rows}
    tensor_parallel.apply(ours, mesh["model"], select=choice)
    styles: dict[str, ParallelStyle] = dict.fromkeys(what.columns, ColwiseParallel())
    styles.update(dict.fromkeys(what.rows, RowwiseParallel()))
    for module in list(theirs.modules()):
        if mine := {layer: style for layer, style in styles.items() if hasattr(module, layer)}:
            parallelize_module(module, mesh.device_mesh(), mine)
    steps = {"ours": stepper(what.loss, ours), "dtensor": stepper(what.loss, theirs)}
    seconds = in_turns(steps, turns, warm=WARM_TURNS)
    found = ours.state_dict()
    other = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in theirs.state_dict().items()}
    worst = max((found[name] - other[name]).abs().max().item() for name in found)
    write_row(folder, rank, {"model": name, "ranks": ranks, "apart": worst} | seconds)


def stepper(loss: Callable[[nn.Module], Tensor], model: nn.Module) -> Callable[[], None]:
    """What trains the model for a step, tensor by tensor: AdamW with `foreach` refuses plain ones beside DTensors."""
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(row: dict) -> None:
    """A line of the table: ratios are of turns that stand beside each other."""
    low, middle, high = quantiles(
        [ours / theirs for ours, theirs in zip(row["ours"], row["dtensor"], strict=True)], n=4
    )
    print(
        f"| {row['model']} | {row['ranks']} | {1e3 * median(row['ours']):.1f} | {1e3 * median(row['dtensor']):.1f} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {row['apart']:.0e} |"
    )


def main() -> None:
    """Start the ranks for each model, save, print."""
    print(
        "| model | ranks | ours, ms a step | DTensor, ms | ours / DTensor | weights apart |\n|---|---|---|---|---|---|"
    )
    compare(run, MODELS, show, doc=__doc__, turns=20, to=HERE / "split_layers.json")


if __name__ == "__main__":
    main()
