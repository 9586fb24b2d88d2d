"""Models whose parameters are narrow take and give what they did before, copies of them too."""

import copy
import pickle

import torch
from torch import nn

from tulle.memory import compute_in


def test_a_narrow_model_is_copied_and_pickled_with_what_casts_for_it():
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(8, 4).bfloat16()), torch.ones(2, 8)
    compute_in(model, torch.bfloat16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        assert other(x).dtype == torch.float32
