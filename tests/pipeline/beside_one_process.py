"""What tests of pipelines share: steps of a model with stages, beside those of one process."""

import torch
from pipeline_networks import WIDTH, Chain, make, worst_gradient

import tulle
from tulle import pipeline

DTYPE = torch.float64


def data(n=8):
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0), dtype=DTYPE)


def loss_of(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


def placed_chain(mesh):
    return pipeline.place(make(Chain), mesh["pipe"], {"layers.0": 0, "layers.1": 1})


def both(kind, assignment, function=loss_of, steps=3, micro_batches=4, by_profile=False, timeout=8):
    mesh = tulle.init(pipe=-1, timeout=timeout)
    model = make(kind)
    reference = make(kind)
    if by_profile:
        pipeline.place(model, mesh["pipe"], sample=data(4))
    else:
        pipeline.place(model, mesh["pipe"], assignment)
    step = pipeline.step(micro_batches=micro_batches)(function)
    worst = 0.0
    for n in range(steps):
        x = data() * (n + 1)
        losses, expected = step(model, x).stack(), step(reference, x).stack().detach()
        worst = max(worst, ((losses - expected).abs() / expected.abs()).max().item(), worst_gradient(model, reference))
    return worst, model, reference
