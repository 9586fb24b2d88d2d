"""What tests of split layers share: a few layers and their loss, and an axis of all ranks."""

import torch
from split_training import ids, square
from torch import nn

import tulle


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(50, 6), nn.TransformerEncoderLayer(6, 6, 10, 0.0, batch_first=True), nn.Linear(6, 6)
    ).double()


def layers_loss(model, step):
    return square(model(ids(2, 5, seed=step)))


def model_axis():
    return tulle.init(model=-1)["model"]
