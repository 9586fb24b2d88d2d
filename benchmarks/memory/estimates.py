"""Estimated against allocated peak of a training step, model by model: `python benchmarks/memory/estimates.py`.

Of twelve models by configuration, and of the zoo of `benchmarks/pipeline`; writes `estimates.json` beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import transformers
from torch import Tensor, nn

from tulle.memory import estimate, measure_peak_bytes
from tulle.memory.estimate import default_loss, tensor_bytes
from tulle.memory.recompute import call

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "pipeline"))
from models import ZOO, first_tensor  # noqa: E402  # pyright: ignore[reportMissingImports]

WORDS, SAMPLES = 500, 8
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": WORDS, "num_hidden_layers": 3}
GATED = SMALL | {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
GPT2 = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": WORDS, "n_positions": 64, "use_cache": False}
T5 = {"num_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16, "vocab_size": WORDS, "use_cache": False}
LANGUAGE = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForMaskedLM": ("BertConfig", SMALL | {"intermediate_size": 128}),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL | {"intermediate_size": 128}),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"decoder_start_token_id": 0}),
    "LlamaForCausalLM": ("LlamaConfig", GATED),
    "MistralForCausalLM": ("MistralConfig", GATED),
    "Qwen3ForCausalLM": ("Qwen3Config", GATED),
    "Gemma2ForCausalLM": ("Gemma2Config", GATED),
    "MixtralForCausalLM": ("MixtralConfig", GATED | {"num_local_experts": 4}),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": WORDS}),
}


class Fallbacks(logging.Handler):
    """Notes whether a step was counted for real."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the word of it."""
        self.count += "counted for real" in record.getMessage()


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], object]]:
    """Name, how to make it, and a batch."""
    ids = torch.randint(3, WORDS, (8, 64), generator=torch.Generator().manual_seed(0))
    for name, (config, options) in LANGUAGE.items():
        made = getattr(transformers, config)(**options)
        yield name, lambda name=name, made=made: getattr(transformers, name)(made), {"input_ids": ids, "labels": ids}
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    yield "nn.TransformerEncoder", lambda: nn.TransformerEncoder(layer, 4), torch.randn(8, 64, 64)
    yield "nn.LSTM", lambda: nn.LSTM(64, 128, 2, batch_first=True), torch.randn(8, 64, 64)
    for name, entry in ZOO.items():
        yield f"zoo: {name}", entry.build, entry.inputs(SAMPLES)


def loss_of(name: str, output: object) -> Tensor:
    """What is minimized."""
    return first_tensor(output).pow(2).mean() if name.startswith("zoo") else default_loss(output)


def main() -> None:
    """Estimate, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="parts of names; all if none is given")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    fallbacks = Fallbacks()
    logging.getLogger("tulle").addHandler(fallbacks)
    logging.getLogger("tulle").setLevel(logging.INFO)
    rows: list[dict[str, object]] = []
    ratios: list[float] = []
    print("| model | estimate, MB | allocated, MB | ratio | counted |\n|---|---|---|---|---|")
    for name, make, sample in cases():
        if options.models and not any(part in name for part in options.models):
            continue
        torch.manual_seed(0)
        model, before = make(), fallbacks.count
        optimizer = torch.optim.AdamW(model.parameters())
        found = estimate(model, optimizer, sample, loss=lambda output, name=name: loss_of(name, output))

        def step(
            model: nn.Module = model,
            optimizer: torch.optim.AdamW = optimizer,
            sample: object = sample,
            name: str = name,
        ) -> None:
            loss_of(name, call(model, sample)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        state = [entry for entries in optimizer.state.values() for entry in entries.values()]
        standing = tensor_bytes([*model.parameters(), *model.buffers(), *state])
        peak = standing + measure_peak_bytes(step, torch.device("cpu"))
        how = "for real" if fallbacks.count > before else "without memory"
        ratios.append(found.peak_bytes / peak)
        rows.append({"model": name, "estimate_bytes": found.peak_bytes, "measured_bytes": peak, "counted": how})
        print(f"| {name} | {found.peak_bytes / 1e6:.1f} | {peak / 1e6:.1f} | {ratios[-1]:.3f} | {how} |", flush=True)
    within = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    spread = f"ratio from {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}"
    print(f"{within} of {len(ratios)} within 15%; {spread}")
    if not options.models:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        (HERE / "estimates.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
