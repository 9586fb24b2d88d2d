"""One two-layer language model twice, with the same equations: in named dimensions, and with DTensors by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tulle import named as tn

BATCH, LENGTH, WIDTH, HEADS, KV, INNER, WORDS, LAYERS = 8, 32, 64, 4, 16, 256, 512, 2
batch, length, memory = tn.dims(batch=BATCH, length=LENGTH, memory_length=LENGTH)
d, h, k, f, v = tn.dims(d_model=WIDTH, heads=HEADS, d_kv=KV, d_ff=INNER, vocab=WORDS)

LAYOUTS = {
    "batch/4": ({"data": 4}, "batch:data"),
    "batch/2 x model/2": ({"data": 2, "model": 2}, "batch:data, heads:model, d_ff:model"),
    "length/4": ({"data": 4}, "length:data"),
}


class Named(tn.Module):
    """The model in named dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = tn.param(v, d, std=0.5), tn.param(d, v)
        for layer in range(LAYERS):
            for name in "qkv":
                setattr(self, f"{name}{layer}", tn.param(d, h, k))
            setattr(self, f"o{layer}", tn.param(h, k, d, inputs=(h, k)))
            setattr(self, f"up{layer}", tn.param(d, f))
            setattr(self, f"down{layer}", tn.param(f, d))

    def forward(self, ids: tn.Tensor, targets: tn.Tensor) -> tn.Tensor:
        x = tn.gather(self.table, ids, v)
        bias = tn.causal_bias(length, memory)
        for layer in range(LAYERS):
            w = {name: getattr(self, f"{name}{layer}") for name in ("q", "k", "v", "o", "up", "down")}
            y = tn.layer_norm(x, d)
            m = y.rename(length=memory)
            q, key, value = y.dot(w["q"], d), m.dot(w["k"], d), m.dot(w["v"], d)
            weights = tn.softmax(q.dot(key, k) * KV**-0.5 + bias, memory)
            x = x + weights.dot(value, memory).dot(w["o"], (h, k))
            x = x + tn.relu(tn.layer_norm(x, d).dot(w["up"], d)).dot(w["down"], f)
        return tn.mean(tn.cross_entropy(x.dot(self.out, d), targets, v))


class Annotated(nn.Module):
    """The model with DTensors: each parameter's placement by hand, and what has to be redistributed on the way."""

    def __init__(self, mesh: DeviceMesh, layout: str, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self.whole: list[Placement] = [Replicate()] * mesh.ndim
        model = mesh.ndim > 1
        sides = {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0}
        for name, value in values.items():
            side = sides.get(name.rstrip("0123456789"))
            placements = [Replicate(), Shard(side)] if model and side is not None else self.whole
            self.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh, placements)))
        self.split: list[Placement] = [Shard(1 if layout == "length/4" else 0), *[Replicate()] * (mesh.ndim - 1)]

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ids, targets = (distribute_tensor(one, self.mesh, self.split) for one in (ids, targets))
        x = F.embedding(ids, self._placed("table"))
        after = torch.ones(LENGTH, LENGTH).triu(1) * -1e9
        seen = [Shard(0)] if self.layout == "length/4" else self.whole
        bias = distribute_tensor(after, self.mesh, seen)
        for layer in range(LAYERS):
            w = {name: self._placed(f"{name}{layer}") for name in ("q", "k", "v", "o", "up", "down")}
            y = F.layer_norm(x, (WIDTH,))
            m = _moved(y, self.whole) if self.layout == "length/4" else y
            q = torch.einsum("bld,dhk->bhlk", y, w["q"])
            key, value = (torch.einsum("bmd,dhk->bhmk", m, w[name]) for name in "kv")
            weights = torch.softmax(torch.einsum("bhlk,bhmk->bhlm", q, key) * KV**-0.5 + bias, -1)
            mixed = torch.einsum("bhlm,bhmk->bhlk", weights, value)
            x = x + _moved(torch.einsum("bhlk,hkd->bld", mixed, w["o"]), self.split)
            inner = torch.relu(torch.einsum("bld,df->blf", F.layer_norm(x, (WIDTH,)), w["up"]))
            x = x + _moved(torch.einsum("blf,fd->bld", inner, w["down"]), self.split)
        logits = torch.einsum("bld,dv->blv", x, self._placed("out"))
        return F.cross_entropy(logits.transpose(1, 2), targets)

    def _placed(self, name: str) -> torch.Tensor:
        return self.get_parameter(name)


def _moved(tensor: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=placements)


def named_step(mesh: object, layout: str) -> tuple[Callable[[], float], dict[str, torch.Tensor]]:
    """A step in named dimensions, forward, backward and finished gradients; and the parameters, whole."""
    from tulle.mesh import Mesh

    assert isinstance(mesh, Mesh)
    with tn.use(mesh, layout):
        model = Named().init(seed=0)
        values = {name: tn.to_torch(getattr(model, name).detach()).clone() for name, _ in model.named_parameters()}
    ids, targets = tokens()

    def step() -> float:
        with tn.use(mesh, layout):
            loss = model(tn.from_torch(ids, (batch, length)), tn.from_torch(targets, (batch, length)))
            loss.backward()
            model.zero_grad()
        return loss.item()

    return step, values


def annotated_step(mesh: DeviceMesh, layout: str, values: dict[str, torch.Tensor]) -> Callable[[], float]:
    """The same step with DTensors."""
    model = Annotated(mesh, layout, values)
    ids, targets = tokens()

    def step() -> float:
        loss = model(ids, targets)
        loss.backward()
        for parameter in model.parameters():
            gradient, data = parameter.grad, parameter.data
            assert isinstance(gradient, DTensor)
            assert isinstance(data, DTensor)
            gradient.redistribute(placements=data.placements)
        model.zero_grad()
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return whole.item()

    return step


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of words."""
    whole = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
