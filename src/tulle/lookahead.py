"""`lookahead`: hands a loader's batches on, and tells the rows of the next one while the model works on this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn

from tulle.engine import Feed, living_split_tables, looking_ahead
from tulle.errors import DataError, ModelError

T = TypeVar("T")
Ids = Callable[[Any], Mapping[str, Tensor]] | Mapping[str, Any]
_OVER = object()


class Lookahead(Generic[T]):
    """Batches of a loader, of which one is read ahead: what `lookahead` gives. Attributes are the loader's."""

    def __init__(self, loader: Iterable[T], ids: Ids | None) -> None:
        self._loader = loader
        self._ids = _by_key(ids) if isinstance(ids, Mapping) else ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r})"

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no loader yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[T]:
        models = living_split_tables()
        feeds = [tables.begin_lookahead(self._ids) for tables in models]
        named = {name for feed in feeds for name in feed.numbers}
        for feed in feeds:
            feed.named = named
        batches = iter(self._loader)
        try:
            upcoming = next(batches, _OVER)
            _tell(feeds, upcoming)
            with looking_ahead():
                while upcoming is not _OVER:
                    batch = cast("T", upcoming)
                    for feed in feeds:
                        feed.begin(batch)
                    upcoming = next(batches, _OVER)
                    _tell(feeds, upcoming)
                    yield batch
                    for feed in feeds:
                        feed.end()
        finally:
            for tables, feed in zip(models, feeds, strict=True):
                tables.end_lookahead(feed)


def _tell(feeds: Sequence[Feed], upcoming: object) -> None:
    for feed in feeds:
        if upcoming is _OVER:
            feed.tell_the_end()
        else:
            feed.tell_ahead(upcoming)


def lookahead(loader: Iterable[T], ids: Ids | None = None) -> Lookahead[T]:
    """Go through a loader's batches, and fetch the rows of split tables one step early.

    A rank holds only some rows of a table that is split. While the model works on one batch, its owners are told which
    rows the next batch looks up, and right after `optimizer.step()` they send them. Without this loop everything works,
    too, but forward asks for the rows and waits for them. Tables that are not split are not concerned. Every rank must
    use it alike, with as many batches. Loops may lie within one another: rows are fetched early in the innermost.

    Args:
        loader: Any iterable of batches, a `DataLoader` say. One batch more than usual is held.
        ids: Which ids a batch looks up, by table. Either a function that is given the batch and returns a mapping from
            tables to ids, or only the ids if there is one table; or a mapping from tables to the keys or attributes of
            the batch that hold their ids. A table is named by its parameter, `"words.weight"`, or module, `"words"`, of
            any model.
            More ids than are looked up do no harm. With None the first two steps are watched, to learn which tensors
            of the batch, or parts of them, the model looks up as they are.

    Raises:
        DataError: If `loader` cannot be iterated over, or `ids` is neither; or, once rows are fetched early, before a
            rank's last batch if another rank has more batches.
        ModelError: In the loop, if `ids` names no table, or no key of the batch, or a lookup asks for a row that was
            not among its ids.

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> [batch.tolist() for batch in tulle.lookahead([torch.tensor([1, 2]), torch.tensor([3])])]
        [[1, 2], [3]]

    Source: Li et al., *EmbRace* (ICPP'22): a batch's ids are known long before gradients are.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"tulle.lookahead was given a {type(loader).__name__}, expected batches to iterate over")
    if isinstance(ids, nn.Module) or not (ids is None or callable(ids) or isinstance(ids, Mapping)):
        raise DataError(
            f"tulle.lookahead was given a {type(ids).__name__} as ids, expected a function from the batch to the ids "
            "of each table, or a mapping from tables to keys of the batch; models are found without being given"
        )
    return Lookahead(loader, ids)


def _by_key(keys: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Tensor]]:
    return lambda batch: {table: _under(key, batch, table) for table, key in keys.items()}


def _under(key: Any, batch: Any, table: str) -> Tensor:
    with suppress(LookupError, TypeError):
        return batch[key]
    if isinstance(key, str) and not isinstance(batch, Mapping) and hasattr(batch, key):
        return getattr(batch, key)
    found = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
    raise ModelError(
        f"tulle.lookahead was given {key!r} as the key of the ids of {table!r}, and the batch {found}: give its "
        "key, or a function from the batch to the ids of each table"
    )
