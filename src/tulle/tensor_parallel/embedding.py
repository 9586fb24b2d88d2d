"""`VocabularyEmbedding`: an embedding with its rows split over an axis: each rank looks up its own, and all are summed.

Source: Shoeybi et al., *Megatron-LM* (2019), section 3.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tulle.tensor_parallel.region import Region


class VocabularyEmbedding(nn.Embedding):
    """`nn.Embedding` that holds a range of its rows."""

    region: Region
    first: int
    """The number of this rank's first row."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids `[...]`, the same on every rank, to `[..., embedding_dim]`, the same on every rank."""
        rows = self.weight.shape[0]
        own = input - self.first
        is_row = (input >= 0) & (input < self.num_embeddings)  # torch refuses all else, on every rank
        is_foreign = is_row & ((own < 0) | (own >= rows))
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        is_here = padding is not None and 0 <= padding < rows
        found = functional.embedding(own.masked_fill(is_foreign, 0), self.weight, padding if is_here else None)
        return self.region.leave(found.masked_fill(is_foreign.unsqueeze(-1), 0))
