"""*Mesh-TensorFlow* (Shazeer et al., NeurIPS'18): which layout, and how large a model on each mesh.

The language models of the paper: six layers of width 1,024, `heads` = 8 n of 256, `d_ff` = 8,192 n, 32,768 words, a
batch of 256 sequences of 256. The paper's people chose a mesh and rules for each; here `tn.best_layout` chooses among
all meshes of as many cores and all rules, by time, within a core's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from evidence import Constant, Curve, Known, Panel, Published, Reproduction, Role, Row, explain_deviation, said

from tulle import named as tn
from tulle.cost import Network
from tulle.named.explain import Explanation, Rates, explain

PAPER = "*Mesh-TensorFlow: Deep Learning for Supercomputers*, Shazeer et al., NeurIPS'18, arXiv 1811.02084"
SAME_RULES, SAME_MESH = "rules found on the paper's mesh", "mesh and rules found among all meshes"
BATCH, LENGTH, LAYERS, WIDTH, HEAD, WORDS = 256, 256, 6, 1024, 256, 32_768
CORE_BYTES = 8 * 10**9
PEAK_FLOP_PER_S = 22.5e12
EFFICIENCY = 0.6
RATES = Rates(EFFICIENCY * PEAK_FLOP_PER_S, 3e11, Network(2e-6, 3.1e10))
STEPS_OF_TRAINING, HOURS_OF_TRAINING = 136_000, 13.0
NAMES = ("batch", "length", "memory_length", "d_model", "heads", "d_kv", "d_ff", "vocab")
SCALES = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
RULES = "batch:data, heads:model, d_ff:model, vocab:model"


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that the paper trained, and on what.

    Args:
        billions: Of parameters, as released.
        scale: Its n: a half for the smallest.
        data: Cores along the batch.
        model: Cores along `d_ff`, heads and vocabulary.
    """

    billions: float
    scale: float
    data: int
    model: int

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes."""
        return {"data": self.data, "model": self.model}


TRAINED = (
    Trained(0.14, 0.5, 32, 1),
    Trained(0.22, 1, 32, 1),
    Trained(0.37, 2, 8, 4),
    Trained(0.67, 4, 8, 4),
    Trained(1.28, 8, 16, 8),
    Trained(2.48, 16, 16, 32),
    Trained(4.90, 32, 16, 32),
)
_length, _memory, _batch = tn.dims(length=LENGTH, memory_length=LENGTH, batch=BATCH)
_width, _head, _words = tn.dims(d_model=WIDTH, d_kv=HEAD, vocab=WORDS)


class LanguageModel(tn.Module):
    """The paper's decoder.

    Values are 16 bits; with two more slots of state, that is as much as 32-bit weights beside 16-bit ones and
    gradients, as Mesh-TensorFlow keeps them; Adafactor's own state is small.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.heads, self.d_ff = tn.dims(heads=round(8 * scale), d_ff=round(8192 * scale))
        self.table, self.out = self._param(_words, _width), self._param(_width, _words)
        for layer in range(LAYERS):
            for name in ("query", "key", "value"):
                setattr(self, f"{name}{layer}", self._param(_width, self.heads, _head))
            setattr(self, f"mixed{layer}", self._param(self.heads, _head, _width))
            setattr(self, f"up{layer}", self._param(_width, self.d_ff))
            setattr(self, f"down{layer}", self._param(self.d_ff, _width))

    def forward(self, ids: tn.Tensor) -> tn.Tensor:
        """The loss by sample."""
        x = tn.gather(self.table, ids, _words)
        for layer in range(LAYERS):
            of = {name: getattr(self, f"{name}{layer}") for name in ("query", "key", "value", "mixed", "up", "down")}
            y = tn.layer_norm(x, _width)
            memory = y.rename(length=_memory)
            query, key, value = (
                y.dot(of["query"], _width),
                memory.dot(of["key"], _width),
                memory.dot(of["value"], _width),
            )
            mixed = tn.attention(query, key, value, (_length, _memory, _head), is_causal=True)
            x = x + mixed.dot(of["mixed"], (self.heads, _head))
            x = x + tn.relu(tn.layer_norm(x, _width).dot(of["up"], _width)).dot(of["down"], self.d_ff)
        return tn.cross_entropy(tn.layer_norm(x, _width).dot(self.out, _width), ids, _words)

    @property
    def billions(self) -> float:
        """Of parameters."""
        attention = 4 * WIDTH * self.heads.size * HEAD
        return (LAYERS * (attention + 2 * WIDTH * self.d_ff.size) + 2 * WORDS * WIDTH) / 1e9

    @staticmethod
    def _param(*dims: tn.Dim) -> tn.Parameter:
        return tn.param(*dims, dtype=torch.bfloat16)


def sample() -> tn.Tensor:
    """A batch on paper."""
    return tn.from_torch(torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta"), (_batch, _length))


def best(scale: float, mesh_or_cores: Mapping[str, int] | int) -> Explanation:
    """The fastest layout that fits."""
    model = LanguageModel(scale)
    return tn.best_layout(model, sample(), mesh_or_cores, memory_bytes=CORE_BYTES, rates=RATES, best=1)[0]


def by_rules(scale: float, mesh: Mapping[str, int]) -> Explanation:
    """The paper's rules on a mesh."""
    return explain(LanguageModel(scale), sample(), mesh, RULES)


def largest(mesh: Mapping[str, int]) -> float:
    """The largest n, a power of two, of a model that fits a mesh under the paper's rules."""
    return max(scale for scale in divisible(mesh) if by_rules(scale, mesh).memory_bytes <= CORE_BYTES)


def divisible(mesh: Mapping[str, int]) -> list[float]:
    """The n whose heads, 8 n, can be dealt to the cores."""
    return [scale for scale in SCALES if 8 * scale % mesh["model"] == 0]


def is_theirs(found: Explanation, one: Trained) -> bool:
    """Whether a layout is the paper's, whatever its axes are called."""
    return roles(found) == roles(by_rules(one.scale, one.mesh))


def roles(found: Explanation) -> dict[str, int]:
    """Into how many parts each dimension is cut."""
    parts = {
        name: prod(found.sizes[axis] for axis in found.layout.axes_of(name) if axis in found.sizes) for name in NAMES
    }
    return {name: size for name, size in parts.items() if size > 1}


def reproduce() -> Reproduction:
    """Layouts and sizes."""
    chosen = [best(one.scale, one.data * one.model) for one in TRAINED]
    on_mesh = [best(one.scale, one.mesh) for one in TRAINED]
    theirs = [by_rules(one.scale, one.mesh) for one in TRAINED]
    cells = [
        [
            f"{one.billions:g}",
            f"{LanguageModel(one.scale).billions:.2f}",
            _mesh(by_rules(one.scale, one.mesh)),
            _mesh(ours),
            "yes" if is_theirs(fixed, one) else "no",
            f"{their.seconds(RATES) * 1e3:.0f}",
            f"{ours.seconds(RATES) * 1e3:.0f}",
            f"{ours.memory_bytes / 1e9:.1f}",
        ]
        for one, ours, fixed, their in zip(TRAINED, chosen, on_mesh, theirs, strict=True)
    ]
    heads = [
        "billions, paper",
        "ours",
        "the paper's parts",
        "best_layout's, all meshes",
        "the paper's rules found on its mesh",
        "step by the paper's, ms",
        "step by best_layout's, ms",
        "GB a core",
    ]
    rows = _rows(chosen, on_mesh, theirs)
    return Reproduction(
        "mesh_tensorflow",
        PAPER,
        CONSTANTS,
        rows,
        [_panel()],
        _remarks(rows, chosen, theirs),
        [("Layouts", heads, cells)],
    )


def _rows(chosen: Sequence[Explanation], on_mesh: Sequence[Explanation], theirs: Sequence[Explanation]) -> list[Row]:
    released = "configuration released with the paper"
    count = Published(len(TRAINED), released, Known.READ)
    last = theirs[-1]
    step_s = last.seconds(RATES)
    trained = Published(
        1e3 * 3600 * HOURS_OF_TRAINING / STEPS_OF_TRAINING,
        "13 hours (recalled) by 136,000 steps (read)",
        Known.RECALLED,
    )
    rows = [
        Row(SAME_RULES, _agreeing(on_mesh), "models", count, Role.CHECKED),
        Row(SAME_MESH, _agreeing(chosen), "models", count, Role.CHECKED),
        Row("4.9 B on 512 cores: a step", step_s * 1e3, "ms", trained, Role.CHECKED),
        Row(
            "4.9 B on 512 cores: of peak",
            100 * last.flops / step_s / PEAK_FLOP_PER_S,
            "%",
            Published(50, "discussion of efficiency, a lower bound", Known.RECALLED),
            Role.CHECKED,
        ),
    ]
    for mesh in {(one.data, one.model): one.mesh for one in TRAINED}.values():
        most = max(one.billions for one in TRAINED if one.mesh == mesh)
        ours = LanguageModel(largest(mesh)).billions
        what = f"batch:{mesh['data']} model:{mesh['model']}: largest model"
        rows.append(Row(what, ours, "B", Published(most, f"{released}, largest on this mesh", Known.READ), Role.BEYOND))
    return rows


def _agreeing(found: Sequence[Explanation]) -> int:
    return sum(is_theirs(ours, one) for ours, one in zip(found, TRAINED, strict=True))


def _mesh(found: Explanation) -> str:
    parts: dict[int, list[str]] = {}
    for name, size in roles(found).items():
        parts.setdefault(size, []).append(name)
    return "; ".join(f"{', '.join(sorted(names))} by {size}" for size, names in parts.items())


def _panel() -> Panel:
    lines: list[Curve] = []
    for mesh in {(one.data, one.model): one.mesh for one in TRAINED}.values():
        billions = [LanguageModel(scale).billions for scale in divisible(mesh)]
        held = [by_rules(scale, mesh).memory_bytes / 1e9 for scale in divisible(mesh)]
        lines.append(Curve(f"batch:{mesh['data']} model:{mesh['model']}", billions, held))
    dots = Curve(
        "trained in the paper",
        [LanguageModel(one.scale).billions for one in TRAINED],
        [by_rules(one.scale, one.mesh).memory_bytes / 1e9 for one in TRAINED],
        is_published=True,
    )
    ends = [LanguageModel(scale).billions for scale in (SCALES[0], SCALES[-1])]
    limit = Curve("a core has", ends, [CORE_BYTES / 1e9] * 2)
    return Panel("memory", "Memory of a core, by mesh", "billions of parameters", "GB", [*lines, limit, dots], True)


CONSTANTS = (
    Constant(
        "model", "6 layers; n = 0.5 to 32", "released configuration; layers by arithmetic from the number of parameters"
    ),
    Constant("batch", "256 sequences of 256", "released configuration; length assumed"),
    Constant("core", "22.5 Tflop/s, 8 GB, 300 GB/s", "TPU v2, half a chip: public specification"),
    Constant("reached of peak", f"{EFFICIENCY:.0%}", "assumed, for all layouts alike"),
    Constant(
        "network", "31 GB/s and 2 us a round on each axis", "assumed: two of a chip's four links for each of its cores"
    ),
    Constant(
        "memory", "8 bytes a parameter", "32-bit weights, 16-bit copies and gradients; Adafactor's state is small"
    ),
)


def _remarks(rows: Sequence[Row], chosen: Sequence[Explanation], theirs: Sequence[Explanation]) -> list[str]:
    by_name = {row.what: row for row in rows}
    gains = [their.seconds(RATES) / ours.seconds(RATES) - 1 for ours, their in zip(chosen, theirs, strict=True)]
    other = [
        f"{one.billions:g} B: {_mesh(ours)} instead of {_mesh(their)}, predicted {gain:.1%} faster"
        for one, ours, their, gain in zip(TRAINED, chosen, theirs, gains, strict=True)
        if not is_theirs(ours, one)
    ]
    room = [
        f"{row.what}: {said(row.ours, row.unit)} fits; the paper trained {said(row.paper.value, row.unit)}."
        for row in rows
        if row.role is Role.BEYOND and row.paper
    ]
    return [
        f"On the paper's own meshes the search takes the paper's rules for "
        f"{by_name[SAME_RULES].ours:.0f} of {len(TRAINED)} models; left free, it takes the paper's mesh too "
        f"for {by_name[SAME_MESH].ours:.0f}.",
        "Where it differs it is by little, so that other rates would turn it: " + "; ".join(other) + ".",
        explain_deviation(by_name["4.9 B on 512 cores: a step"], cause="the share of peak was assumed"),
        *room,
        "Sizes are powers of two; the paper does not say that its meshes could hold no more.",
    ]
