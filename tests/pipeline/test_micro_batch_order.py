"""`Turns` over a mailbox whose messages come when the test says."""

from types import SimpleNamespace

from tulle.pipeline.turn import Turn
from tulle.pipeline.turns import Turns


class Messages:
    """Both come while the first is looked for when both are awaited: too late for that one to be seen."""

    def __init__(self) -> None:
        self.axis, self.asks_peers = SimpleNamespace(rank=0, size=2), False
        self.looks, self.came = 0, False

    def has(self, key: int) -> bool:
        was_there = self.came
        self.looks += key == 0
        self.came = self.looks >= 2
        return was_there

    def await_any(self, wanted, what) -> None:
        assert self.came, f"{what()} never comes"


def test_a_micro_batch_does_not_pass_an_older_one_whose_message_came_before_its_own():
    messages, order = Messages(), []
    turns = [Turn(number) for number in range(2)]

    def forward(turn: Turn) -> None:
        turn.wait(turn.micro_batch, 1, f"the value of {turn.micro_batch}")
        order.append(turn.micro_batch)

    for turn in turns:
        program = SimpleNamespace(seed=turn.micro_batch, held=0, stage=0, stage_in_backward=0)
        turn.begin(program, lambda turn=turn: forward(turn))
    Turns(turns, messages, "1f1b", stages=2).run()
    assert order == [0, 1]
