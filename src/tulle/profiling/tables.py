"""Measures what a plan rests on: which tables a model has, and how many of their rows one batch touches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tulle.parts import LOOKUPS, rows_by_number
from tulle.pipeline.placeholder import is_about_shape
from tulle.pipeline.profile import as_call
from tulle.pipeline.randomness import State
from tulle.pipeline.structure import flatten
from tulle.pipeline.trial import trial
from tulle.pipeline.untouched import untouched
from tulle.pipeline.written import written_back
from tulle.softmax import SoftmaxLayer
from tulle.tables import TableModule, has_own_forward, table_modules


def trained_tables(model: nn.Module) -> dict[str, TableModule]:
    """The embeddings that are trained, by the name of their parameter; a shared one once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, TableModule] = {}
    for _, module, table in table_modules(model):
        if table.requires_grad:
            found.setdefault(names[id(table)], module)
    return found


def sparse_tables(model: nn.Module) -> dict[str, TableModule]:
    """Those of them with `sparse=True`."""
    return {name: module for name, module in trained_tables(model).items() if module.sparse}


def call(model: nn.Module, sample: object) -> object:
    """Call a model with one batch, on its device: a mapping by name, a tuple by position, else as the one argument."""
    device = next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))
    args, kwargs = as_call(sample, device)
    return model(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Lookups:
    """What one batch looks up in one table.

    Args:
        rows: Distinct row numbers, ascending.
        tokens: Lookups, repeats counted.
        is_read: Whether something else than a lookup read it too, a product with all of its rows say, or may do so: it
            must stay whole.
    """

    rows: Tensor
    tokens: int
    is_read: bool = False


def rows_touched(model: nn.Module, sample: object) -> dict[str, Tensor]:
    """Distinct rows that one batch looks up in each trained table, ascending, by parameter name.

    Runs one forward, without gradients if that does, and leaves no trace: random states, buffers, rows are as before.
    """
    return {name: lookups.rows for name, lookups in looked_up(model, sample).items()}


def looked_up(model: nn.Module, sample: object) -> dict[str, Lookups]:
    """What one batch looks up in each trained table, by parameter name; leaves no trace, as `rows_touched`."""
    tables = trained_tables(model)

    def look() -> tuple[dict[int, list[Tensor]], set[int]]:
        seen: dict[int, list[Tensor]] = {id(module.weight): [] for module in tables.values()}
        with _Watch(seen, model) as watch:
            call(model, sample)
        return seen, watch.read | watch.unknown

    with _traceless(model):
        seen, read = trial(look)
    found = {
        name: torch.cat([module.weight.new_empty(0, dtype=torch.long), *seen[id(module.weight)]])
        for name, module in tables.items()
    }
    return {
        name: Lookups(torch.unique(ids), len(ids), is_read=id(tables[name].weight) in read)
        for name, ids in found.items()
    }


class _Watch(TorchFunctionMode):
    """Notes the ids of each lookup where it is made: a table's own `forward` may be given something else than ids.

    Args:
        seen: Where to put them, by the identity of the table.
        model: Whose tables they are.
    """

    def __init__(self, seen: Mapping[int, list[Tensor]], model: nn.Module) -> None:
        super().__init__()
        self.read: set[int] = set()
        """Tables, by identity, that something else reads than lookups and a softmax that can be split with them."""
        self._seen = seen
        tables = list(table_modules(model))
        self._is_sparse = {id(table): module.sparse for _, module, table in tables}
        self._softmaxes = [one for one in model.modules() if isinstance(one, SoftmaxLayer)]
        self._depth = 0
        """How many of these are being called."""
        self._uncalled = {module: id(table) for _, module, table in tables if has_own_forward(module)}
        self._hooks: list[RemovableHandle] = []

    @property
    def unknown(self) -> set[int]:
        """Tables, by identity, of modules with a forward of their own that was not called: it may read all rows."""
        return set(self._uncalled.values())

    def __enter__(self) -> Self:
        """Watch, and note which modules are being called."""

        def deeper(by: int) -> Any:
            def note(*_: object) -> None:
                self._depth += by

            return note

        def called(module: nn.Module, _: object) -> None:
            self._uncalled.pop(cast("TableModule", module), None)

        for module in self._softmaxes:
            self._hooks.append(module.register_forward_pre_hook(deeper(1)))
            self._hooks.append(module.register_forward_hook(deeper(-1), always_call=True))
        for module in self._uncalled:
            self._hooks.append(module.register_forward_pre_hook(called))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at lookups, and let everything through."""
        if func in LOOKUPS:
            self._note(inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
        elif (rows := rows_by_number(func, args, kwargs or {})) is not None:
            self._note({"input": rows.ids, "weight": args[0]})
        elif not self._depth and not is_about_shape(func):
            self.read |= {id(leaf) for leaf in flatten((args, kwargs))[0] if isinstance(leaf, nn.Parameter)}
        return func(*args, **(kwargs or {}))

    def _note(self, given: Mapping[str, Any]) -> None:
        """The ids of a lookup, if it is in one of the tables."""
        becomes_dense = self._is_sparse.get(id(given["weight"]), False) and not given.get("sparse", False)
        is_written = given.get("max_norm") is not None  # not by the modules' own, which is put aside meanwhile
        if becomes_dense or is_written:
            self.read.add(id(given["weight"]))
        if (noted := self._seen.get(id(given["weight"]))) is not None:
            ids = given["input"].reshape(-1).long()
            padding = given.get("padding_idx")
            noted.append(ids if padding is None else ids[ids != padding % len(given["weight"])])


@contextmanager
def _traceless(model: nn.Module) -> Iterator[None]:
    """Have a forward leave no trace: in modules, in parameters, or in what random numbers come next."""
    random_state = State.now()
    with untouched(model), written_back(model):
        for module in model.modules():
            if isinstance(module, TableModule):
                module.max_norm = None  # else a lookup would write rows, unseen
        try:
            yield
        finally:
            random_state.restore()
