"""What `estimate` says against what the allocator hands out."""

import weakref

import pytest
import torch
from torch import nn

from crossing import crossed
from tulle.errors import ModelError
from tulle.memory import Memory, estimate, lines, measure_peak_bytes, recompute
from tulle.memory.estimate import default_loss, tensor_bytes
from tulle.memory.recompute import call

WITHIN = 0.15


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 32, 64)


def network():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), torch.randn(16, 256)


def pictures():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 10)
    )
    return model, torch.randn(8, 3, 16, 16)


def reads_values():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh() if x.sum().item() < 1e9 else x
            return x

    return Reads(), torch.randn(512, 128)


def recurrent():
    return nn.LSTM(64, 128, 2, batch_first=True), torch.randn(8, 64, 64)


def language_model():
    transformers = pytest.importorskip("transformers")
    options = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64, "use_cache": False}
    ids = torch.randint(500, (4, 64))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)), {"input_ids": ids, "labels": ids}


def measured(model, optimizer, sample):
    """The allocator's peak of a step after the first, what stays between steps included."""

    def step():
        default_loss(call(model, sample)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [entry for entries in optimizer.state.values() for entry in entries.values()]
    standing = tensor_bytes([*model.parameters(), *model.buffers(), *state])
    return standing + measure_peak_bytes(step, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "kind"), crossed([encoder, network, pictures, reads_values, language_model, recurrent], ["AdamW", "SGD"])
)
def test_the_peak_is_that_of_the_allocator(make, kind):
    torch.manual_seed(0)
    model, sample = make()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    found = estimate(model, optimizer, sample)
    assert found.parameters_bytes == tensor_bytes([*model.parameters(), *model.buffers()])
    peak = measured(model, optimizer, sample)
    assert abs(found.peak_bytes / peak - 1) < WITHIN


def test_recomputation_shows_in_the_estimate_as_in_the_allocator():
    model, sample = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    names = [f"layers.{number}" for number in range(4)]
    plain = estimate(model, optimizer, sample)
    found = estimate(model, optimizer, sample, options=Memory(recompute=tuple(names)))
    assert found.activations_bytes < plain.activations_bytes / 4
    recompute(model, names)
    assert abs(found.peak_bytes / measured(model, optimizer, sample) - 1) < WITHIN


def test_options_divide_what_they_shard():
    model, sample = network()
    optimizer = torch.optim.Adam(model.parameters())
    plain = estimate(model, optimizer, sample, ranks=4)
    zero = estimate(model, optimizer, sample, ranks=4, options=Memory(shard_optimizer=True))
    full = estimate(model, optimizer, sample, ranks=4, options=Memory(full_shard=True))
    narrow = estimate(model, optimizer, sample, ranks=4, options=Memory(shard_optimizer=True, precision="bf16"))
    alone = estimate(model, optimizer, sample, ranks=4, options=Memory(precision="bf16"))
    assert alone.parameters_bytes == plain.parameters_bytes // 2 + plain.parameters_bytes  # masters are whole
    assert alone.optimizer_bytes == pytest.approx(plain.optimizer_bytes, rel=1e-3)
    assert zero.optimizer_bytes == plain.optimizer_bytes // 4
    assert (zero.parameters_bytes, zero.gradients_bytes) == (plain.parameters_bytes, plain.gradients_bytes)
    assert full.parameters_bytes == plain.parameters_bytes // 4
    assert narrow.gradients_bytes * 2 == plain.gradients_bytes
    assert narrow.parameters_bytes == plain.parameters_bytes // 2 + plain.parameters_bytes // 4
    assert full.peak_bytes < zero.peak_bytes < plain.peak_bytes
    assert "peak" in str(plain)


def test_what_is_frozen_has_no_masters_and_does_not_travel():
    model, sample = network()
    model[:5].requires_grad_(False)
    trained_bytes = sum(p.nbytes for p in model[5].parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    plain = estimate(model, optimizer, sample, ranks=2)
    zero = estimate(model, optimizer, sample, ranks=2, options=Memory(shard_optimizer=True))
    narrow = estimate(model, optimizer, sample, ranks=2, options=Memory(shard_optimizer=True, precision="bf16"))
    full = estimate(model, optimizer, sample, ranks=2, options=Memory(full_shard=True, precision="bf16"))
    assert zero.peak_bytes < plain.peak_bytes + trained_bytes
    assert narrow.parameters_bytes == plain.parameters_bytes // 2 + trained_bytes // 2
    assert full.parameters_bytes == (plain.parameters_bytes + trained_bytes) // 4
    found = {line.option: line for line in lines(model, optimizer, sample, ranks=2)}
    assert found["shard_optimizer"].sent_bytes == trained_bytes // 2


def test_lines_are_of_the_loss_that_is_given():
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer, options = torch.optim.SGD(model.parameters()), {"loss": lambda y: torch.cat([y] * 16).square().mean()}
    plain = estimate(model, optimizer, sample, ranks=2, **options)
    assert plain.peak_bytes > estimate(model, optimizer, sample, ranks=2).peak_bytes
    for line in lines(model, optimizer, sample, ranks=2, **options):
        assert line.saving_bytes == plain.peak_bytes - line.estimate.peak_bytes


def test_each_option_is_a_line_with_its_saving_and_its_price():
    model, sample = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    found = {line.option: line for line in lines(model, optimizer, sample, ranks=4)}
    plain = estimate(model, optimizer, sample, ranks=4)
    assert all(line.saving_bytes == plain.peak_bytes - line.estimate.peak_bytes for line in found.values())
    assert all(line.saving_bytes > 0 for line in found.values())
    assert found["shard_optimizer"].sent_bytes == sum(p.nbytes for p in model.parameters()) * 3 // 4
    assert "forward of 4 modules runs twice" in str(found["recompute"])
    # bfloat16 halves the bytes of the gradients' all-reduce, 2 (n - 1) / n, and adds an all-gather, (n - 1) / n.
    assert found["precision"].sent_bytes == -(sum(p.nbytes for p in model.parameters()) * 3 // 8)


def test_the_model_its_optimizer_and_the_random_numbers_stay_as_they_were():
    model, sample = pictures()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    estimate(model, optimizer, sample)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_that_gives_nothing_trainable_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ModelError, match="nothing that the model gives, a Tensor, depends on its parameters: give loss="
    ):
        estimate(nn.Identity(), optimizer, torch.ones(2))


def test_nothing_refers_to_the_model_afterwards():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    estimate(model, torch.optim.AdamW(model.parameters()), torch.ones(2, 4))
    assert not any(weakref.getweakrefs(parameter) for parameter in model.parameters())
