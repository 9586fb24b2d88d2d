"""Finds output layers that a `ShardedSoftmax` could replace, and words the offer: never taken up unasked."""

from __future__ import annotations

from torch import nn

from tulle.tables import table_modules, table_of

MANY_ROWS = 10_000
"""An `nn.Linear` with so many outputs is taken to choose a class among them."""


def offers(model: nn.Module, ranks: int) -> list[str]:
    """One sentence for each `nn.Linear` that is as large as a vocabulary, or whose weight is an embedding's.

    Whether a cross entropy follows cannot be seen from the modules, so the sentence says that it must.

    Args:
        model: As its user wrote it.
        ranks: That will train it.

    Example:
        >>> model = nn.ModuleDict({"words": nn.Embedding(50_000, 256), "out": nn.Linear(256, 50_000, bias=False)})
        >>> for text in offers(model, ranks=8):
        ...     print(text)
        out (Linear 256 x 50,000): each rank holds 51.2 MB of it and sends a gradient of that size in every step; if a cross entropy follows, tulle.ShardedSoftmax(50_000, 256) in place of both holds 6.4 MB a rank and sends hidden states instead
    """  # noqa: E501
    tables = {id(table): name for name, module, table in table_modules(model) if isinstance(module, nn.Embedding)}
    return [
        _offer(name, layer, tables.get(id(weight)), ranks)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and (weight := table_of(layer)) is not None
        and weight.requires_grad
        and (layer.out_features >= MANY_ROWS or id(weight) in tables)
    ]


def _offer(name: str, layer: nn.Linear, table: str | None, ranks: int) -> str:
    tied = f", tied to {table}" if table is not None else ""
    shape = f"{layer.out_features:_}, {layer.in_features}" if table is None else f"weight={table}.weight"
    bias = "" if layer.bias is None else ", bias=True"
    whole_mb = layer.weight.nbytes / 1e6
    return (
        f"{name or 'the model'} (Linear {layer.in_features:,} x {layer.out_features:,}{tied}): each rank holds "
        f"{whole_mb:,.1f} MB of it and sends a gradient of that size in every step; if a cross entropy follows, "
        f"tulle.ShardedSoftmax({shape}{bias}) in place of both holds {whole_mb / ranks:,.1f} MB a rank and sends "
        "hidden states instead"
    )
