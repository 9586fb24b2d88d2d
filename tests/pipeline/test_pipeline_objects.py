"""Objects of the user's own that modules are given, change and make, on any number of stages."""

from types import SimpleNamespace

import pytest
import torch
from beside_one_process import both, data, loss_of
from pipeline_networks import WIDTH, make
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import DataError, TulleError


class Batch:
    """A batch of graphs, say: layers read it, put their results in it, and count."""

    def __init__(self, x):
        self.x, self.first = x, x.cos()
        self.count, self.seen, self.sizes = 0, [], {}
        self.itself = self


class Update(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        y = self.norm(self.linear(batch.itself.x))
        batch.x = torch.tanh(y + batch.first)
        batch.count += 1
        batch.seen.append(batch.x.mean())
        batch.sizes[batch.count] = batch.x.shape[0]
        return batch


class Graphs(nn.Module):
    """What layers have put into an object is read between them, and changed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Update() for _ in range(4))

    def forward(self, x):
        batch = Batch(x)
        for layer in self.layers:
            given = batch
            batch = layer(batch)
            assert batch is given
            assert batch.itself is batch
            batch.x = batch.x * batch.count
        assert sorted(batch.sizes) == [1, 2, 3, 4]
        return batch.x + sum(batch.seen) * batch.first


@pytest.mark.parametrize("stages", [2, 3])
@on_ranks(2, 3)
def test_what_modules_put_into_an_object_is_there_for_all(stages):
    worst, model, reference = both(Graphs, {f"layers.{n}": n * stages // 4 for n in range(4)})
    assert worst < 1e-12
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    for n, (layer, other) in enumerate(zip(model.layers, reference.layers, strict=True)):
        if n * stages // 4 % axis.size == axis.rank:
            assert layer.calls == other.calls
            torch.testing.assert_close(layer.norm.running_mean, other.norm.running_mean, rtol=1e-12, atol=1e-12)
            assert layer.norm.num_batches_tracked == other.norm.num_batches_tracked


@on_ranks(2)
def test_an_object_goes_by_a_profile():
    worst, _, _ = both(Graphs, None, by_profile=True)
    assert worst < 1e-12


class Coder(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 2 * WIDTH)

    def forward(self, x):
        mean, scale = super().forward(x).chunk(2, -1)
        return Normal(mean, scale.exp())


class Decoder(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, code):
        return Normal(super().forward(code.mean), 1 + code.variance)


class Variational(nn.Module):
    """Modules that give distributions."""

    def __init__(self):
        super().__init__()
        self.coder, self.decoder = Coder(), Decoder()

    def forward(self, x):
        code = self.coder(x)
        decoded = self.decoder(code)
        return kl_divergence(code, Normal(torch.zeros_like(code.mean), 1.0)) - decoded.log_prob(x)


@on_ranks(2)
def test_modules_give_and_take_distributions():
    worst, _, _ = both(Variational, {"coder": 0, "decoder": 1})
    assert worst < 1e-12


class Checkpointed(Variational):
    def forward(self, x):
        code = checkpoint(self.coder, x, use_reentrant=False)
        return checkpoint(self.decoder, code, use_reentrant=False).log_prob(x)


@on_ranks(2)
def test_objects_go_through_checkpoints():
    worst, _, _ = both(Checkpointed, {"coder": 0, "decoder": 1})
    assert worst < 1e-12


class Posterior(nn.Linear):
    """Leaves a distribution on itself, as layers of Bayesian networks do."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.prior, self.posterior = Normal(0.0, 1.0), None

    def forward(self, x):
        mean = super().forward(x).tanh()
        self.posterior = Normal(mean, mean.exp())
        return mean


class Bayesian(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Posterior() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + sum(kl_divergence(layer.posterior, layer.prior) for layer in self.layers)


@pytest.mark.parametrize("by_profile", [False, True])
@on_ranks(2)
def test_a_distribution_that_a_module_leaves_on_itself_is_there_for_all(by_profile):
    worst, _, _ = both(Bayesian, {f"layers.{n}": n % 2 for n in range(3)}, by_profile=by_profile)
    assert worst < 1e-12


CALLS = []


class Sometimes(nn.Linear):
    """Reads, of what it is given, what lives elsewhere, but not the first time."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, batch):
        CALLS.append(x)
        return super().forward(x) + (batch.x if len(CALLS) > 1 else 0.0)


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Sometimes()

    def forward(self, x):
        return self.second(x, SimpleNamespace(x=self.first(x).tanh()))


@on_ranks(2)
def test_what_is_read_for_the_first_time_in_a_later_call_is_named():
    with pytest.raises(TulleError, match="reads what an object holds that lives at another stage"):
        both(Late, {"first": 0, "second": 1})


class Once(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, cache):
        cache.append(super().forward(cache[-1]).tanh())


class Stack(list):
    """A list of a class of its own."""


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Once() for _ in range(3))

    def forward(self, x):
        stack = Stack([x])
        for layer in self.layers:
            layer(stack)
        return torch.stack(list(stack)).sum(0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@on_ranks(3)
def test_every_schedule_takes_objects_along(schedule):
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(Stacked), make(Stacked)
    pipeline.place(model, axis, {f"layers.{n}": n for n in range(3)})
    step = pipeline.step(micro_batches=4, schedule=schedule)(loss_of)
    for _ in range(2):
        assert torch.equal(step(model, data()).stack(), step(reference, data()).stack())
    own = model.layers[axis.rank].weight.grad
    torch.testing.assert_close(own, reference.layers[axis.rank].weight.grad, rtol=1e-12, atol=1e-12)


def held(model, x):
    batch = SimpleNamespace(y=model(x), n=3)
    batch.y.pow(2).mean().backward()
    return batch


@on_ranks(2)
def test_a_step_gives_objects_with_tensors():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(Stacked), make(Stacked)
    pipeline.place(model, axis, {f"layers.{n}": n % 2 for n in range(3)})
    step = pipeline.step(micro_batches=2)(held)
    for one, other in zip(step(model, data()).outputs, step(reference, data()).outputs, strict=True):
        assert type(one.y) is torch.Tensor
        assert torch.equal(one.y, other.y.detach())
        assert one.n == 3


def of_batch(model, batch):
    loss = (model(batch.x) * batch.weights[0]).pow(2).mean() * batch.scale
    loss.backward()
    return loss


@on_ranks(2)
def test_objects_are_cut_into_micro_batches():
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    model, reference = make(Stacked), make(Stacked)
    pipeline.place(model, axis, {f"layers.{n}": n % 2 for n in range(3)})
    x = data()
    batch = SimpleNamespace(x=x, weights=[x.exp()], scale=2.0, names=["a"])
    losses = pipeline.step(micro_batches=4)(of_batch)(model, batch).stack()
    parts = [
        of_batch(reference, SimpleNamespace(x=one, weights=[one.exp()], scale=2.0)).detach()
        for one in x.tensor_split(4)
    ]
    assert torch.equal(losses, torch.stack(parts))
    assert batch.x is x
    assert pipeline.step(micro_batches=2, split={"batch": None})(of_batch)(model, batch).stack().unique().numel() == 1
    batch.other = x[:3]
    with pytest.raises(DataError, match="different numbers of samples"):
        pipeline.step(micro_batches=2)(of_batch)(model, batch)
    assert pipeline.step(micro_batches=1)(lambda model, batch: batch)(model, batch).outputs[0] is batch


class Repeated(nn.Module):
    """Two calls of a Hugging Face model with one cache."""

    def __init__(self):
        super().__init__()
        hf = pytest.importorskip("transformers")
        settings = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
        config = hf.LlamaConfig(vocab_size=WIDTH, hidden_size=8, **settings)
        self.inner = hf.LlamaForCausalLM(config)

    def forward(self, x):
        ids = x.argsort(-1)
        out = self.inner(ids[:, :3], use_cache=True)
        return self.inner(ids[:, 3:], past_key_values=out.past_key_values).logits


LLAMA = {"embed_tokens": 0, "layers.0": 0, "layers.1": 1, "layers.2": 2, "norm": 2}


@on_ranks(2, 3)
def test_a_cache_of_keys_and_values_is_given_to_a_second_call():
    stages = {f"inner.model.{name}": stage for name, stage in LLAMA.items()}
    worst, _, _ = both(Repeated, {**stages, "inner.lm_head": 2})
    assert worst < 1e-12


class Adds(nn.Linear):
    def forward(self, one, other):
        one.seen.append(super().forward(one.seen[-1]).tanh())
        return other[-1] if isinstance(other, list) else other.seen[-1]


class Sharing(nn.Module):
    """One list is in two objects, and beside one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Adds(WIDTH, WIDTH), Adds(WIDTH, WIDTH)

    def forward(self, x):
        seen = [x]
        one, other = SimpleNamespace(seen=seen), SimpleNamespace(seen=seen)
        y = self.first(one, other) + self.second(one, seen)
        assert one.seen is seen
        return y + sum(seen)


@on_ranks(2)
def test_a_list_in_two_objects_is_one_for_modules_too():
    worst, _, _ = both(Sharing, {"first": 0, "second": 1})
    assert worst < 1e-12


class Two(tuple):
    """A tuple of a class of its own."""


class GivesTwo(nn.Linear):
    kind = Two

    def forward(self, x):
        y = super().forward(x[0])
        return self.kind((y, y.sin()))


class Tuples(nn.Module):
    kind = GivesTwo

    def __init__(self):
        super().__init__()
        self.first, self.second = self.kind(WIDTH, WIDTH), self.kind(WIDTH, WIDTH)

    def forward(self, x):
        return sum(self.second(self.first([x])))


@on_ranks(2)
def test_tuples_of_other_classes_are_taken_apart():
    worst, _, _ = both(Tuples, {"first": 0, "second": 1})
    assert worst < 1e-12


class GivesSet(GivesTwo):
    kind = set

    def forward(self, x):
        return super().forward(list(x))


class Sets(Tuples):
    kind = GivesSet


@on_ranks(2)
def test_what_is_trained_in_what_is_not_taken_apart_is_refused():
    with pytest.raises(TulleError, match="needs a gradient within something that is not taken apart"):
        both(Sets, {"first": 0, "second": 1})
