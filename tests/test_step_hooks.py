"""Hooks that come after those of others, whenever these were registered."""

from functools import partial

import pytest
import torch

from tulle.step_hooks import hook_failed, hook_last


def test_ours_come_after_those_of_others_and_hear_of_later_ones():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    called: list[str] = []

    def ours(name, optimizer, arguments, keywords, others_behind):
        called.append(f"{name}, {others_behind} behind")

    def theirs(name, *_):
        called.append(name)

    hook_last(optimizer, partial(ours, "first"))
    optimizer.register_step_pre_hook(partial(theirs, "between"))
    hook_last(optimizer, partial(ours, "second"))
    optimizer.register_step_pre_hook(partial(theirs, "late"))

    optimizer.step()
    assert called == ["first, 2 behind", "between", "second, 1 behind", "late"]
    called.clear()
    optimizer.step()
    assert called == ["between", "late", "first, 0 behind", "second, 0 behind"]


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
