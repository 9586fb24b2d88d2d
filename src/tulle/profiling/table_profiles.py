"""`table_profiles`: what lookups do to each table, as all ranks saw it on their own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import gather_values
from tulle.mesh import Axis
from tulle.placing import outputs_of, placements_of, tables_of
from tulle.profiling.borrowed import own
from tulle.profiling.steps import Twin
from tulle.profiling.tables import Lookups, looked_up
from tulle.tables import TableModule
from tulle.workload import TableProfile

Looks = Mapping[str, Lookups]
"""What one batch looks up, by table."""
_LABEL = "rows touched"
_RANKS_TRIED = 2
"""A table that can be split over so few can be split over more, but for its width."""


def looks(twin: Twin) -> list[Looks]:
    """What each sample of a twin looks up, as gradients tell where they are sparse, else as modules are called."""
    found: list[Looks] = []
    for sample in twin.samples:
        seen = looked_up(twin.model, sample)
        own(twin.borrowed, {id(twin.model.get_parameter(name)) for name, one in seen.items() if one.is_read})
        if any(module.sparse for module in twin.model.modules() if isinstance(module, TableModule)):
            twin.forward(sample).backward()
            seen = {name: _by_gradient(twin.model.get_parameter(name).grad, one) for name, one in seen.items()}
            twin.clear()
        found.append({name: replace(one, rows=one.rows.cpu()) for name, one in seen.items()})
    return found


def _by_gradient(grad: Tensor | None, seen: Lookups) -> Lookups:
    """A table may be read past its module, by a softmax over samples, say."""
    if grad is None or not grad.is_sparse:
        return seen
    rows = grad._indices()[0]
    return replace(seen, rows=torch.unique(rows), tokens=len(rows))


def table_profiles(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    seen: Sequence[Looks],
    owners: Mapping[str, str],
    axis: Axis,
) -> tuple[TableProfile, ...]:
    """The trained tables of a model. Every rank of the axis must call it.

    Args:
        model: The model.
        optimizers: Over its parameters.
        seen: What this rank's samples look up.
        owners: The piece that each parameter belongs to.
        axis: All ranks.
    """
    by_rank = gather_values([*seen], axis, label=_LABEL)
    outputs, placements = outputs_of(model), placements_of(model, optimizers, _RANKS_TRIED, is_seen=True)
    found: list[TableProfile] = []
    for name, modules in tables_of(model).items():
        parameter = model.get_parameter(name)
        if not parameter.requires_grad:
            continue
        steps = [[one[name] for one in ranks if name in one] for ranks in zip(*by_rank, strict=True)]
        counts = [one.tokens for step in steps for one in step]
        rows, width = parameter.shape
        found.append(
            TableProfile(
                name,
                rows,
                width,
                parameter.element_size(),
                is_sparse=name not in outputs and all(module.sparse for module in modules),
                placements=() if any(one.is_read for step in steps for one in step) else placements[name],
                module=owners[name],
                stream=tuple(tuple(one.rows for one in step) for step in steps if step),
                tokens=sum(counts) / len(counts) if counts else 0.0,
            )
        )
    return tuple(found)
