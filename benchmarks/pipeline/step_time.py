"""Predicted against measured time of a step, and peak memory of each stage, of models that are dealt by profile.

torchrun --nproc-per-node 4 benchmarks/pipeline/step_time.py --out benchmarks/pipeline/results/step-time-4.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import tulle
from models import first_tensor
from tulle import pipeline
from tulle.comm import gather_values
from tulle.estimate import step_seconds

WORDS, LENGTH, SAMPLES, MICRO_BATCHES = 2000, 64, 8, 8
GPT2 = {"n_layer": 12, "n_embd": 256, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH, "use_cache": False}
BERT = {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": WORDS}
LLAMA = BERT | {"num_key_value_heads": 2, "intermediate_size": 512, "use_cache": False}
T5 = {"num_layers": 4, "d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64, "vocab_size": WORDS}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForMaskedLM": ("BertConfig", BERT | {"intermediate_size": 1024}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "MixtralForCausalLM": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"use_cache": False}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1)
    rows = [measure(name, mesh, options.steps) for name in options.models]
    if mesh.rank == 0:
        for row in rows:
            print(json.dumps(row))
        if options.out:
            options.out.parent.mkdir(exist_ok=True)
            options.out.write_text(json.dumps(rows, indent=1))


def measure(name: str, mesh: tulle.Mesh, steps: int) -> dict[str, object]:
    config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, name)(getattr(hf, config)(**settings)).train()
    ids = torch.randint(3, WORDS, (SAMPLES * MICRO_BATCHES, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if name.startswith("T5") else {})
    pipeline.place(model, mesh["pipe"], sample={key: value[:SAMPLES] for key, value in batch.items()})
    placed = pipeline.placement_of(model)
    assert placed is not None, "it was just placed"
    assert placed.partition is not None, "it was dealt by its profile"
    step = pipeline.step(micro_batches=MICRO_BATCHES)(train)
    times = []
    for _ in range(steps + 1):
        begin_s = time.perf_counter()
        step(model, batch)
        times.append(max(gather_values(time.perf_counter() - begin_s, mesh["pipe"], label="times")))
    predicted_s, measured_s = step_seconds(placed.partition, mesh.size, MICRO_BATCHES), statistics.median(times[1:])
    return {
        "model": name,
        "ranks": mesh.size,
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(measured_s, 4),
        "ratio": round(predicted_s / measured_s, 3),
        "stages_s": [round(time_s, 4) for time_s in placed.partition.times_s],
    }


def train(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = first_tensor(model(**batch)).pow(2).mean()
    loss.backward()
    return loss


if __name__ == "__main__":
    main()
