"""Models and loops for tests of several axes at once: the same on one process and on a mesh."""

from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

import tulle
from gigabit import give_cluster

STEPS, MICRO_BATCHES, BATCH = 3, 2, 8


class Words(nn.Module):
    """Two tables, one of which the plan may split, and a deep network; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8, sparse=True)
        self.tags = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(4)])
        self.out = nn.Linear(8, 10)
        self.out.weight = self.tags.weight

    def forward(self, batch):
        x = self.words(batch["words"]).mean(1) + self.tags(batch["tags"])
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.out(x), batch["targets"])


class DenseWords(Words):
    """The same with dense gradients, which torch's own clipping asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.words.sparse = False


class Stack(nn.Module):
    """A stack of torch's encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 10)

    def forward(self, batch):
        return functional.cross_entropy(
            self.out(self.encoder(self.words(batch["words"] % 20)).mean(1)), batch["targets"]
        )


def gpt2():
    transformers = __import__("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = transformers.GPT2LMHeadModel(config)

        def forward(self, batch):
            return self.network(input_ids=batch["words"], labels=batch["words"]).loss

    return Language()


KINDS = {"words": Words, "dense words": DenseWords, "stack": Stack, "gpt2": gpt2}


def build(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def optimizers(model):
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    others = [p for p in model.parameters() if all(p is not table for table in tables)]
    dense = torch.optim.AdamW(others, lr=0.01, eps=1e-2)
    return [dense, torch.optim.SGD(tables, lr=0.1)] if tables else [dense]


def batch_of(step, rank=0, size=1):
    generator = torch.Generator().manual_seed(step)
    whole = {
        "words": torch.randint(40, (BATCH, 5), generator=generator),
        "tags": torch.randint(10, (BATCH,), generator=generator),
        "targets": torch.randint(10, (BATCH,), generator=generator),
    }
    return {name: tensor.chunk(size)[rank] for name, tensor in whole.items()}


@tulle.step(micro_batches=MICRO_BATCHES)
def train_step(model, batch):
    loss = model(batch)
    loss.backward()
    return loss


def train(model, several, rank=0, size=1, steps=range(STEPS), clip=None):
    losses = []
    for step in steps:
        losses.append(train_step(model, batch_of(step, rank, size)).mean().item())
        if clip is not None:
            losses.append(clip(model))
        for one in several:
            one.step()
            one.zero_grad()
    return losses


def distributed(kind, shape, plan=MappingProxyType({}), **options):
    """A model on a mesh, its optimizers, and this rank's place among the replicas; without a plan stages are dealt."""
    mesh = tulle.init(**shape)
    rank, size = 0, 1
    if "data" in mesh:
        rank, size = mesh["data"].rank, mesh["data"].size
    model = build(kind)
    several = optimizers(model)
    with give_cluster(mesh):
        tulle.distribute(model, several, mesh, plan=plan, sample=(batch_of(0, rank, size),), **options)
    return model, several, (rank, size)


def worst_difference(found, wanted):
    assert list(found) == list(wanted)
    return max((found[name].double().cpu() - wanted[name].double().cpu()).abs().max().item() for name in wanted)
