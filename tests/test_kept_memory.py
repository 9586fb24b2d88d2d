"""Memory that steps and micro-batches give back stays with the process."""

import os
import resource

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline

pytestmark = pytest.mark.skipif("MALLOC_TRIM_THRESHOLD_" in os.environ, reason="its user has said what is kept")


def faults_now() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@on_ranks(2)
def test_what_a_step_gives_back_lies_where_the_next_one_takes_it():
    tulle.init()
    faults = []
    for _ in range(4):
        before = faults_now()
        activations = [torch.ones(2**20) for _ in range(64)]
        del activations
        faults.append(faults_now() - before)
    assert sum(faults[2:]) < 10_000, faults  # 65,536 pages a step, if they come anew


@on_ranks(2)
def test_activations_lie_where_those_of_earlier_steps_did():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128)) for _ in range(8)])
    model = pipeline.place(model, tulle.init(pipe=-1)["pipe"], {str(layer): layer // 4 for layer in range(8)})

    @pipeline.step(micro_batches=8)
    def train(model, x):
        model(x).pow(2).mean().backward()

    faults = []
    for _ in range(5):
        before = faults_now()
        train(model, torch.randn(2048, 128))
        faults.append(faults_now() - before)
    # Activations of a rank are 34,000 pages; of three steps 8,000 to 24,000 came anew on one rank or the other.
    assert sum(faults[2:]) < 4000, faults
