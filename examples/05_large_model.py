"""Trains a Hugging Face model, by the name of its configuration, on any mesh: no rank holds the whole of it.

tulle run --processes 4 examples/05_large_model.py --model llama                            # four stages, by a profile
tulle run --processes 8 examples/05_large_model.py --mesh data=2,pipe=2,model=2 --checkpoint run/checkpoint
python examples/05_large_model.py                                                           # one process: the same
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parallel_text
import torch
import transformers as hf
from torch import Tensor, nn

import tulle

BYTES = 259  # a token for each byte; 0 fills up
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", "n_embd n_layer n_head n_positions"),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        "hidden_size num_hidden_layers num_attention_heads max_position_embeddings",
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", "d_model num_layers num_heads"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", "hidden_size num_hidden_layers num_attention_heads"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", "hidden_size num_hidden_layers num_attention_heads"),
}
FILE = Path(__file__).parent / "data" / "libreoffice.en-de.tsv.xz"


def main() -> None:
    options = parse()
    texts = [source for source, _ in parallel_text.read_pairs(str(options.text))]
    mesh = tulle.init(**options.mesh)
    rank, ranks = (mesh["data"].rank, mesh["data"].size) if "data" in mesh else (0, 1)
    at_least = ranks * (options.micro_batches or 1)
    if options.batch < at_least:
        raise SystemExit(f"--batch {options.batch} is too small for {at_least} micro-batches of all replicas")
    torch.manual_seed(options.seed)
    with tulle.deferred_init():  # nothing is allocated yet: each rank makes its stage only
        model = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    batches = endless_batches(texts, options)
    sample = next(batches).chunk(ranks)[rank]
    model, optimizer = tulle.distribute(model, optimizer, mesh, sample={"input_ids": sample, "labels": sample})
    if mesh.rank == 0:
        print(tulle.plan(model, optimizer, mesh).explain(), flush=True)
    begin = 0
    if options.checkpoint and options.checkpoint.exists():
        begin = tulle.load(options.checkpoint, model, optimizer)["step"]
    step = tulle.step(micro_batches=options.micro_batches)(train_step)
    for number, batch in enumerate(itertools.islice(batches, begin, options.steps), start=begin + 1):
        loss = step(model, batch.chunk(ranks)[rank]).mean().item()
        tulle.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tulle.log(loss=loss, tokens=batch.numel() // ranks, total_steps=options.steps)
        if mesh.rank == 0 and (number % options.print_every == 0 or number == options.steps):
            print(f"step {number} of {options.steps}: loss {loss:.3f} a token", flush=True)
    if options.checkpoint:
        tulle.save(options.checkpoint, model, optimizer, step=options.steps)


def train_step(model: nn.Module, batch: Tensor) -> Tensor:
    """One micro-batch: forward, loss, backward."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss


def build(options: argparse.Namespace) -> nn.Module:
    """A model of the family with random weights, of the size that the options say."""
    kind, config, names = FAMILIES[options.model]
    sizes = dict(zip(names.split(), (options.width, options.depth, options.heads, options.length), strict=False))
    extra = {"d_ff": 4 * options.width, "d_kv": options.width // options.heads} if options.model == "t5" else {}
    if options.model in ("llama", "mixtral"):
        extra = {"intermediate_size": 4 * options.width, "num_key_value_heads": options.heads}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    return getattr(hf, kind)(getattr(hf, config)(vocab_size=BYTES, use_cache=False, **ids, **sizes, **extra))


def endless_batches(texts: list[str], options: argparse.Namespace) -> Iterator[Tensor]:
    """Stretches of the text, `[batch, length]`, the same on all ranks."""
    stream = torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long() + 3
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        begins = torch.randint(len(stream) - options.length, (options.batch,), generator=generator).tolist()
        yield torch.stack([stream[begin : begin + options.length] for begin in begins])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(FAMILIES), default="gpt2")
    parser.add_argument("--text", type=Path, default=FILE)
    told = "sizes of the axes data, pipe and model; -1 for the rest (pipe=-1)"
    parser.add_argument("--mesh", type=axes, default={"pipe": -1}, metavar="AXIS=SIZE,...", help=told)
    parser.add_argument("--checkpoint", type=Path, help="a folder: gone on from, if it is there, and saved to")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--micro-batches", type=int, help="of each replica and step; else what the plan says")
    for name, default in {"width": 128, "depth": 4, "heads": 4, "length": 64, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"steps": 100, "print-every": 10, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def axes(text: str) -> dict[str, Any]:
    """`data=2,pipe=2` as a mapping."""
    return {name.strip(): int(size) for name, size in (axis.split("=") for axis in text.split(","))}


if __name__ == "__main__":
    main()
