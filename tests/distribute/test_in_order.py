"""Ranks of one stage look at their messages when the first of them does, and see what it sees."""

import pytest

import tulle
from ranks import on_ranks
from tulle.distribute.axes import Axes
from tulle.distribute.in_order import MailboxInOrder
from tulle.distribute.stages import _together
from tulle.errors import CommunicationError
from tulle.pipeline.mailbox import Kind, Mailbox


def opened(kind, mesh):
    mailbox = MailboxInOrder(mesh["pipe"], mesh["model"]) if kind is MailboxInOrder else Mailbox(mesh["pipe"])
    mailbox.open(1)
    return mailbox


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", [MailboxInOrder, Mailbox])
def test_a_message_is_there_when_it_is_there_for_the_first(kind):
    mesh = tulle.init(pipe=1, model=-1)
    mailbox, key = opened(kind, mesh), (Kind.VALUE, 1, 1)
    if mesh.rank > 0:
        mailbox._messages[key] = "early"
    is_there = mailbox.has(key)
    assert not is_there or kind is Mailbox, "the twin goes by itself"
    mailbox._messages[key] = "there"
    assert mailbox.has(key)
    mailbox.await_any({0: [key]}, lambda: "a message")


@on_ranks(2)
def test_ranks_that_wait_for_different_messages_are_told():
    mesh = tulle.init(pipe=1, model=2)
    mailbox = opened(MailboxInOrder, mesh)
    if mesh.rank == 0:
        assert not mailbox.has((Kind.VALUE, 1, 1))
    else:
        with pytest.raises(
            CommunicationError, match=r"waits for another value than rank 0.*\(full_shard\).*batches of the same shapes"
        ):
            mailbox.has((Kind.VALUE, 1, 2))


@on_ranks(4)
def test_what_a_stage_exchanges_gives_up_when_all_else_does():
    mesh = tulle.init(data=2, model=2, timeout=123.0)
    stage = _together([mesh["data"], mesh["model"]], Axes.of(mesh).whole)
    assert stage.ranks == (0, 1, 2, 3)
    assert stage.timeout_s == mesh["data"].timeout_s == 123.0
