"""Example 04, in named dimensions: layouts are forecast by `tulle.named` and timed, as plans are of the other examples.

Everything is `tn.explain`'s, at measured rates; those of computation are scaled so that they are true of one rank's
share of the batch under no layout at all, timed on all ranks at once.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from types import ModuleType
from typing import Any

import torch
from agenda import PLAIN_STEPS, WARMUP, in_turn, worth_a_race
from jobs import load, subwords

from tables import PLANNER
from tulle import named as tn
from tulle.comm import barrier, gather_values
from tulle.errors import TulleError
from tulle.memory import measure_peak_bytes
from tulle.mesh import Mesh
from tulle.named.explain import seconds_of
from tulle.named.rates import Rates, measured

BY_HAND = ("batch:data", "heads:data, d_ff:data, vocab:data", "d_ff:data, vocab:data", "vocab:data", "d_ff:data")
_SENTENCES = 64
_LABEL = "the forecast"


class Translation:
    """The example for so many sentences a step, with its data."""

    def __init__(self, sentences: int) -> None:
        self.example: ModuleType = load("04_named_transformer")
        self.options: Namespace = self.example.parse([])
        self.options.batch = sentences
        pairs = self.example.parallel_text.read_pairs(self.options.train)
        vocabulary = subwords(self.example.parallel_text, pairs, self.options.vocabulary)
        self.dims = self.example.Dimensions(self.options, vocabulary.get_vocab_size())
        self.encoded = self.example.parallel_text.encode(pairs, vocabulary)

    def samples(self) -> Iterator[Any]:
        """Batches without end, whole ones on every rank."""
        for batch in self.example.endless_batches(self.encoded, self.options):
            yield self.dims.sample(batch)

    def model(self) -> Any:
        """Without values yet."""
        return self.dims.model(self.options.layers)


def forecast(mesh: Mesh, options: Namespace) -> dict[str, Any]:
    """Predicted and measured steps of the fastest layouts by prediction, and of those by hand. Every rank calls it."""
    axis, plans = mesh["data"], options.plans
    whole, share = Translation(_SENTENCES * axis.size), Translation(_SENTENCES)
    plain_s = timed(share, mesh, "", options.steps)
    base = measured(mesh)
    scale = explained(share, {}, "").seconds(base) / plain_s
    rates = replace(base, flops_per_s=base.flops_per_s * scale, written_bytes_per_s=base.written_bytes_per_s * scale)
    with tn.use(mesh, ""):
        sample = next(whole.samples())
    ranking = tn.best_layout(whole.model(), sample, mesh, best=max(1, plans - len(BY_HAND) + 1), rates=rates)
    layouts = {PLANNER: str(ranking[0].layout)}
    layouts |= {one: one for one in BY_HAND} if axis.size > 1 else {}
    layouts |= {f"runner-up {number}": str(other.layout) for number, other in enumerate(ranking[1:], 1)}
    found = [told(name, layout, whole, mesh, rates) for name, layout in islice(layouts.items(), plans + 1)]
    for _ in range(options.rounds):
        for entry in found:
            measure(entry, whole, share, mesh, options.steps)
    if options.finals:
        race(found, whole, mesh, options.finals, options.steps)
    return {"step_s": plain_s, "plans": found}


def told(name: str, layout: str, job: Translation, mesh: Mesh, rates: Rates) -> dict[str, Any]:
    """A layout, and what is predicted of it."""
    plan = {"mesh": mesh.shape, "schedule": "step", "tables": [], "layout": layout}
    entry: dict[str, Any] = {"name": name, "plan": plan, "measured_s": [], "plain_s": [], "refusal": ""}
    try:
        explanation = explained(job, mesh.shape, layout)
    except TulleError as refusal:
        return entry | {"refusal": str(refusal)}
    sent_s = sum(seconds_of(one, mesh.shape, rates) for one in explanation.collectives)
    whole_s = explanation.seconds(rates)
    return entry | {
        "predicted_s": whole_s,
        "parts_s": {"compute": whole_s - sent_s, "dense": sent_s},
        "predicted_bytes": explanation.peak_bytes,
    }


def explained(job: Translation, sizes: Mapping[str, int], layout: str) -> Any:
    """What a step costs on paper."""
    return tn.explain(job.model(), next(job.samples()), sizes, layout)


def measure(entry: dict[str, Any], whole: Translation, share: Translation, mesh: Mesh, steps: int) -> None:
    """Time a layout, and what computes the same without it."""
    if entry["refusal"]:
        return
    entry["plain_s"].append(timed(share, mesh, "", PLAIN_STEPS))
    running = Running(whole, mesh, entry["plan"]["layout"])
    entry["measured_s"].append(running.seconds(WARMUP, steps))
    if "measured_bytes" not in entry:
        entry["measured_bytes"] = running.most_bytes()


def race(entries: Sequence[dict[str, Any]], job: Translation, mesh: Mesh, turns: int, steps: int) -> None:
    """Time the fastest layouts and the planner's in turn."""
    own = entries[0]
    others = {one["name"]: one for one in entries if one["measured_s"] and one["plan"] != own["plan"]}
    times_s = {name: median(one["measured_s"]) for name, one in others.items()}
    names = worth_a_race(times_s, median(own["measured_s"]))
    racers = [own, *(others[name] for name in names)]
    for entry in in_turn(racers, turns if names else 0):
        entry.setdefault("final_s", []).append(timed(job, mesh, entry["plan"]["layout"], steps))


def timed(job: Translation, mesh: Mesh, layout: str, steps: int) -> float:
    """Seconds of a step of the slowest rank, of a model made for it."""
    return Running(job, mesh, layout).seconds(WARMUP, steps)


class Running:
    """A model under a layout, with what trains it."""

    def __init__(self, job: Translation, mesh: Mesh, layout: str) -> None:
        self.mesh, self.layout = mesh, layout
        with tn.use(mesh, layout):
            self.model = job.model().init(1).train()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
            self.samples = list(islice(job.samples(), 4))

    def step(self, number: int) -> None:
        """Train on a batch, within `tn.use`."""
        loss = tn.sum(self.model(*self.samples[number % len(self.samples)], label_smoothing=0.05)) * 1e-3
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, warmup: int, steps: int) -> float:
        """Of a step of the slowest rank."""
        axis = self.mesh["data"]
        with tn.use(self.mesh, self.layout):
            for number in range(warmup):
                self.step(number)
            barrier(axis)
            begin_s = time.perf_counter()
            for number in range(steps):
                self.step(number)
            spent_s = (time.perf_counter() - begin_s) / steps
        return max(gather_values(spent_s, axis, label=_LABEL))

    def most_bytes(self) -> int:
        """Of what stands between steps and the most of one step, on the fullest rank."""
        kept = [one for state in self.optimizer.state.values() for one in state.values()]
        held = sum(one.nbytes for one in [*self.model.parameters(), *kept] if isinstance(one, torch.Tensor))
        with tn.use(self.mesh, self.layout):
            peak_bytes = held + measure_peak_bytes(lambda: self.step(0), self.mesh.device)
        return max(gather_values(peak_bytes, self.mesh["data"], label=_LABEL))
