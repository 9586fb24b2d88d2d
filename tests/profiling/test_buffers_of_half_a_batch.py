"""Half of a sample, by which a profile tells what fewer samples take, leaves buffers as whole ones want them."""

import torch
from torch import nn

import tulle

KEYS, BATCH = 32, 16


class Contrast(nn.Module):
    """Momentum contrast: a queue of keys, which batches fill from where the last one ended (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8)
        self.register_buffer("queue", torch.zeros(KEYS, 8))
        self.register_buffer("next", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        query, begin = self.query(x), int(self.next)
        with torch.no_grad():
            self.queue[begin : begin + len(x)] = self.key(x)
            self.next.copy_((self.next + len(x)) % KEYS)
        return (query @ self.queue.clone().T).logsumexp(1).mean()


def test_a_queue_of_keys_whose_length_whole_batches_divide_is_profiled():
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    found = tulle.profile(model, optimizer, torch.randn(BATCH, 4))
    assert found.is_divisible
    assert 0 <= found.fixed_share <= 1
    assert int(model.next) == 0, "a copy was profiled"
