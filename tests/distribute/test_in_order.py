"""Ranks of one stage look at their letters when the first of them does, and see what it sees."""

import pytest

import tulle
from ranks import on_ranks
from tulle.distribute.axes import Axes
from tulle.distribute.in_order import PostInOrder
from tulle.distribute.stages import _together
from tulle.errors import CommunicationError
from tulle.pipeline.post import Kind, Post


def opened(kind, mesh):
    post = PostInOrder(mesh["pipe"], mesh["model"]) if kind is PostInOrder else Post(mesh["pipe"])
    post.open(1)
    return post


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", [PostInOrder, Post])
def test_a_letter_is_there_when_it_is_there_for_the_first(kind):
    mesh = tulle.init(pipe=1, model=-1)
    post, key = opened(kind, mesh), (Kind.VALUE, 1, 1)
    if mesh.rank > 0:
        post._mailbox[key] = "early"
    is_there = post.has(key)
    assert not is_there or kind is Post, "the twin goes by itself"
    post._mailbox[key] = "there"
    assert post.has(key)
    post.await_any({0: [key]}, lambda: "a letter")


@on_ranks(2)
def test_ranks_that_wait_for_different_letters_are_told():
    mesh = tulle.init(pipe=1, model=2)
    post = opened(PostInOrder, mesh)
    if mesh.rank == 0:
        assert not post.has((Kind.VALUE, 1, 1))
    else:
        with pytest.raises(
            CommunicationError, match=r"waits for another value than rank 0.*batches of the same shapes"
        ):
            post.has((Kind.VALUE, 1, 2))


@on_ranks(4)
def test_what_a_stage_exchanges_gives_up_when_all_else_does():
    mesh = tulle.init(data=2, model=2, timeout=123.0)
    stage = _together([mesh["data"], mesh["model"]], Axes.of(mesh).whole)
    assert stage.ranks == (0, 1, 2, 3)
    assert stage.timeout_s == mesh["data"].timeout_s == 123.0
