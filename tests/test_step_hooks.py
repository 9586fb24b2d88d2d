"""Hooks that come after those of others, whenever these were registered."""

import inspect
from functools import partial

import pytest
import torch

from tulle.step_hooks import hook_failed, hook_first_after, hook_last


def test_ours_come_after_those_of_others_whenever_these_were_registered():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    called: list[str] = []

    def hear(name, *_):
        called.append(name)

    optimizer.register_step_post_hook(partial(hear, "after"))
    hook_last(optimizer, partial(hear, "first"))
    optimizer.register_step_pre_hook(partial(hear, "between"))
    hook_last(optimizer, partial(hear, "second"))
    hook_first_after(optimizer, partial(hear, "first after"))
    optimizer.register_step_pre_hook(partial(hear, "late"))

    optimizer.step()
    assert called == ["between", "late", "first", "second", "first after", "after"]


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_what_hooks_did_is_undone_where_a_step_fails_and_schedulers_count_the_others(error):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    undone: list[str] = []
    hook_failed(optimizer, partial(undone.append, "first"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    hook_failed(optimizer, partial(undone.append, "second"))

    def fail(*_):
        raise error

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(error):
        optimizer.step()
    assert undone == ["first", "second"]
    hook.remove()
    optimizer.step()
    scheduler.step()
    assert undone == ["first", "second"]
    assert scheduler.get_last_lr() == [0.05]


def test_what_stands_in_the_place_of_a_step_takes_what_that_took():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
    before = inspect.signature(optimizer.step)
    hook_last(optimizer, lambda *_: None)
    hook_failed(optimizer, lambda: None)
    assert inspect.signature(optimizer.step) == before  # torch.amp.GradScaler asks for it
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hook_failed(optimizer, lambda: None)
    assert inspect.signature(optimizer.step) == before
