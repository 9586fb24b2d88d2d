"""Structures of what calls are given are compared by identity, and hold nothing once nobody holds them."""

from weakref import ref

from tulle.pipeline.filled import can_be_filled
from tulle.pipeline.structure import flatten, node


class Key:
    """Something that a dictionary is of."""


def test_the_same_is_the_same_as_long_as_it_is_held():
    first, second = (flatten(({"a": (1, 2)}, [3]))[1] for _ in range(2))
    assert first is second
    assert node(first.kind, first.context, first.children) is first


def test_what_a_dictionary_is_of_is_let_go():
    key = Key()
    gone = ref(key)
    _, spec = flatten((({key: 1},), {}))
    assert can_be_filled(spec)
    del key, spec
    assert gone() is None
