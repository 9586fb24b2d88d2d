"""Predicted against measured time of a step, of models that are dealt by profile, and what the difference is made of.

torchrun --nproc-per-node 4 benchmarks/pipeline/step_time.py --out benchmarks/pipeline/results/step-time-4.json

    ratio                 the formula of `tulle.estimate.step_seconds`, which a partition can tell, by what was measured
    simulated_ratio       the same of what `tulle.profile` and the simulator say of these stages
    profiled_of_alone     what the pieces take in all, beside one micro-batch of the whole model on a rank by itself:
                          below 1 something between pieces is not seen, above 1 they are weighed too heavily
    at_once_of_alone      the same micro-batch on all ranks at once, beside that: what ranks of one machine share
    busy_of_predicted     what each rank works in a step, beside what its stages were predicted to take: below 1.2 and
                          above 0.8 while `ratio` is not, the order of the step is what is predicted wrongly
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import tulle
from models import first_tensor
from tulle import pipeline
from tulle.comm import barrier, gather_values
from tulle.estimate import step_seconds
from tulle.plan import Plan
from tulle.plan.lower import lower
from tulle.simulate import Step, run
from tulle.workload import Profile

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
    sample = {key: value[:SAMPLES] for key, value in batch.items()}
    alone_s, at_once_s = whole_seconds(model, sample, mesh, steps)
    profile = tulle.profile(model, torch.optim.SGD(model.parameters(), 0.0), sample, mesh, loss=loss_of)
    pipeline.place(model, mesh["pipe"], sample=sample)
    placed = pipeline.placement_of(model)
    assert placed is not None, "it was just placed"
    assert placed.partition is not None, "it was dealt by its profile"
    step = pipeline.step(micro_batches=MICRO_BATCHES)(train)
    times, busy = [], []
    for _ in range(steps + 1):
        begin_s = time.perf_counter()
        step(model, batch)
        mine_s = time.perf_counter() - begin_s
        of_ranks = gather_values((mine_s, mine_s * (1 - placed.runtime.bubble)), mesh["pipe"], label="times")
        times.append(max(whole_s for whole_s, _ in of_ranks))
        busy.append([busy_s for _, busy_s in of_ranks])
    predicted_s, measured_s = step_seconds(placed.partition, mesh.size, MICRO_BATCHES), statistics.median(times[1:])
    busy_s = [statistics.median(of_rank) for of_rank in zip(*busy[1:], strict=True)]
    simulated_s = simulated(profile, placed.stages, mesh.size)
    stages_s = placed.partition.times_s
    return {
        "model": name,
        "ranks": mesh.size,
        "predicted_s": round(predicted_s, 4),
        "simulated_s": round(simulated_s, 4),
        "measured_s": round(measured_s, 4),
        "ratio": round(predicted_s / measured_s, 3),
        "simulated_ratio": round(simulated_s / measured_s, 3),
        "stages_s": [round(time_s, 4) for time_s in stages_s],
        "profiled_of_alone": round(sum(stages_s) / alone_s, 3),
        "at_once_of_alone": round(at_once_s / alone_s, 3),
        "busy_of_predicted": [round(b / (MICRO_BATCHES * s), 3) for b, s in zip(busy_s, stages_s, strict=True)],
    }


def simulated(profile: Profile, stages: Mapping[str, int], ranks: int) -> float:
    """Forward and backward of a step, without the optimizer's update, as the planner sees it."""
    plan = Plan({"pipe": ranks}, stages=stages, micro_batches=MICRO_BATCHES)
    whole = lower(plan, profile, profile.cluster, batch=SAMPLES * MICRO_BATCHES)
    tasks = (replace(task, seconds=0.0) if task.kind == "update" else task for task in whole.tasks)
    return run(Step(whole.mesh, tuple(tasks))).step_s


def whole_seconds(model: nn.Module, sample: dict[str, Tensor], mesh: tulle.Mesh, repeats: int) -> tuple[float, float]:
    """Forward and backward of a micro-batch of the whole model: on the first rank alone, and on all ranks at once."""
    alone, at_once = [], []
    for turn in range(2 * repeats + 2):
        barrier(mesh["pipe"])
        begin_s = time.perf_counter()
        if turn % 2 or mesh.rank == 0:
            train(model, sample)
        (at_once if turn % 2 else alone).append(
            gather_values(time.perf_counter() - begin_s, mesh["pipe"], label="times")
        )
    model.zero_grad(set_to_none=True)
    return statistics.median(one[0] for one in alone[1:]), statistics.median(max(one) for one in at_once[1:])


def train(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_of(model(**batch))
    loss.backward()
    return loss


def loss_of(given: Any) -> Tensor:
    return first_tensor(given).pow(2).mean()


if __name__ == "__main__":
    main()
