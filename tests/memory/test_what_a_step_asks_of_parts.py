"""A step under full sharding asks its parts past what guards them, which takes microseconds each time."""

import sys
from collections import Counter

import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.parts import Part

GUARD = Part.__torch_function__.__func__.__code__


@on_ranks(2)
def test_forward_and_backward_ask_nothing_of_what_guards_parts():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = tulle.init(data=-1)
    plan = tulle.Plan(mesh.shape, memory=tulle.Memory(full_shard=True))
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan)
    asked = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code is GUARD:
            asked[frame.f_back.f_code.co_filename, frame.f_back.f_lineno] += 1

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        try:
            model(torch.ones(4, 8)).sum().backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    assert asked == {}
