"""`explain`: what a model costs under a layout, line by line, without running it and without processes.

The model's own step runs on tensors without numbers (torch's meta device), on a mesh on paper (`PlannedWire`): what is
counted is what would happen, because it is the same program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tulle.cost import all_reduce_cost, exchange_cost
from tulle.errors import MeshError, ModelError
from tulle.live import LiveBytes
from tulle.mesh import Mesh
from tulle.named.dims import Chosen, Dims, Layout
from tulle.named.ledger import GRADIENTS, Ledger, Line, memory_of
from tulle.named.module import named_parameters, show_parts
from tulle.named.planned import Collective, PlannedWire
from tulle.named.randomness import drawn_again, mark
from tulle.named.rates import Rates
from tulle.named.reduction import mean
from tulle.named.scope import Scope, current, entered
from tulle.named.tensor import Tensor

Sizes = Mesh | Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one step of a model costs on each rank under a layout, forward and backward.

    Args:
        sizes: Ranks along each axis.
        layout: The rules.
        lines: By the line of the program, in the order in which they run; the parameters' gradients last.
        collectives: All exchanges, in order.
        parameter_bytes: This rank's parts of the parameters.
        gradient_bytes: Of those that are trained.
        state_bytes: What the optimizer keeps.
        peak_bytes: The most memory at once: parameters, state, and all tensors that are alive at the step's height.
    """

    sizes: Mapping[str, int]
    layout: Layout
    lines: tuple[Line, ...]
    collectives: tuple[Collective, ...]
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    peak_bytes: int

    @property
    def flops(self) -> int:
        """Of products, forward and backward."""
        return sum(line.flops for line in self.lines)

    @property
    def bytes_sent(self) -> int:
        """Payload that a rank sends."""
        return sum(one.bytes_sent for one in self.collectives)

    @property
    def messages(self) -> int:
        """Messages that a rank sends."""
        return sum(one.messages for one in self.collectives)

    @property
    def kept_bytes(self) -> int:
        """Activations that are kept from forward to backward."""
        return sum(line.kept_bytes for line in self.lines)

    @property
    def written_bytes(self) -> int:
        """Memory that operations fill."""
        return sum(line.written_bytes for line in self.lines)

    @property
    def memory_bytes(self) -> int:
        """Parameters, their gradients, the optimizer's state and the activations kept."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes + self.kept_bytes

    def by_label(self) -> dict[str, tuple[int, int]]:
        """Bytes and messages by operation, as `tulle.comm.traffic` counts them."""
        counts: dict[str, tuple[int, int]] = {}
        for one in self.collectives:
            sent, messages = counts.get(one.label, (0, 0))
            counts[one.label] = (sent + one.bytes_sent, messages + one.messages)
        return counts

    def seconds(self, rates: Rates) -> float:
        """Predicted time of a step: computation, exchanges and the optimizer's update, one after the other."""
        updated_bytes = self.gradient_bytes + self.state_bytes
        local_s = self.flops / rates.flops_per_s + (self.written_bytes + updated_bytes) / rates.written_bytes_per_s
        return local_s + sum(seconds_of(one, self.sizes, rates) for one in self.collectives)

    def __str__(self) -> str:
        wide = max([18, *(len(line.where) for line in self.lines)])
        head = f"{'line':<{wide}} {'Gflop':>9} {'MB sent':>9} {'messages':>8} {'MB kept':>9}  collectives, code"
        rows = [_row(line, wide) for line in self.lines]
        total = _cells("in all", wide, self.flops, self.bytes_sent, self.messages, self.kept_bytes)
        memory = (
            f"memory of each rank: {self.memory_bytes / 1e6:.1f} MB "
            f"({self.parameter_bytes / 1e6:.1f} parameters, {self.gradient_bytes / 1e6:.1f} gradients, "
            f"{self.state_bytes / 1e6:.1f} optimizer, {self.kept_bytes / 1e6:.1f} activations), "
            f"{self.peak_bytes / 1e6:.1f} MB at the height of a step"
        )
        mesh = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return "\n".join([f"mesh ({mesh}), layout '{self.layout}'", head, *rows, total, memory])


def explain(
    model: nn.Module, sample: object, mesh: Sizes, layout: Layout | str | Chosen, *, state_slots: int = 2
) -> Explanation:
    """What one step of a model costs on each rank under a layout: flops, collectives, bytes and memory, by line.

    Needs no processes, allocates nothing, and leaves the model as it is: one that was never initialized will do.

    Args:
        model: Called as `tulle.distribute` calls it; gives a named loss (its mean is taken if it has dimensions).
        sample: One batch of named tensors, whole, made without a mesh: only their dimensions count.
        mesh: The mesh, or its axes' sizes.
        layout: The rules.
        state_slots: Numbers that the optimizer keeps for each parameter: 2 for Adam.

    Raises:
        PlanError: If the layout is not legal for the model.
        ModelError: If the model does not give a named tensor.
        MeshError: If the mesh is not one, or a size is not positive.
    """
    wire = PlannedWire(sizes_of(mesh, "explain"))
    scope = Scope(wire, Layout.of(layout))
    ledger = Ledger()
    wire.ledger = ledger
    with entered(scope), on_paper(model, scope) as held, ledger, LiveBytes("meta") as live:
        parameters = [one.parameter for one in held]
        step(model, sample, ledger, parameters)
    parameter_bytes = sum(parameter.nbytes for parameter in parameters)
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    lines = sorted(ledger.lines.values(), key=lambda line: line.place == GRADIENTS)
    kept = tuple(line for line in lines if line.flops or line.messages or line.kept_bytes)
    state_bytes = state_slots * trained_bytes
    return Explanation(
        wire.sizes,
        scope.layout,
        kept,
        tuple(wire.collectives),
        parameter_bytes,
        trained_bytes,
        state_bytes,
        parameter_bytes + state_bytes + live.peak_bytes,
    )


def sizes_of(mesh: Sizes, by: str) -> dict[str, int]:
    """How many ranks each axis has.

    Raises:
        MeshError: If it is no mesh, or a size is not positive.
    """
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping):
        raise MeshError(f"{by} was given {mesh!r} as mesh, expected what tulle.init returns, or sizes of axes by name")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"{by} was given a mesh with {name}={size!r}, expected a positive number of ranks")
    return dict(sizes)


def step(model: nn.Module, sample: object, ledger: Ledger | None, parameters: list[nn.Parameter]) -> Tensor:
    """Forward and backward of one batch under the scope in force."""
    there = {memory_of(parameter) for parameter in parameters}
    with ledger.keeping(there) if ledger else nullcontext():
        loss = call(model, sample)
        number = mean(loss) if loss.dims else loss
        whole = number.local
    whole.backward()
    return number.detach()


def call(model: nn.Module, sample: object) -> Tensor:
    """The model on a sample, its named tensors brought under the scope in force.

    Raises:
        ModelError: If it does not give a named tensor.
    """
    if isinstance(sample, Mapping):
        loss = model(**{name: _brought(value) for name, value in sample.items()})
    elif isinstance(sample, tuple):
        loss = model(*[_brought(value) for value in sample])
    else:
        loss = model(_brought(sample))
    if not isinstance(loss, Tensor):
        raise ModelError(f"the model gave {type(loss).__name__}, expected its loss as a tn.Tensor")
    return loss


class Part(NamedTuple):
    """A parameter on paper.

    Args:
        dims: Its dimensions; none of a plain module's, which is whole.
        parameter: This rank's part, without numbers.
    """

    dims: Dims
    parameter: nn.Parameter


@contextmanager
def on_paper(model: nn.Module, scope: Scope) -> Iterator[list[Part]]:
    """Let a model's parameters be parts without numbers, laid out for a scope, within the block; draws do not count."""
    held = []
    parts: list[Part] = []
    try:
        for name, parameter in named_parameters(model):
            scope.axes(parameter.dims, f"parameter {name}")
            part = torch.empty(scope.local_shape(parameter.dims), dtype=parameter.dtype, device="meta")
            parts.append(Part(parameter.dims, nn.Parameter(part, requires_grad=parameter.requires_grad)))
            held.append((parameter, parameter.scope, parameter.place_under(scope, parts[-1].parameter)))
        show_parts(model)
        with torch.enable_grad(), drawn_again(mark()), _plain_on_paper(model) as plain:
            yield [*parts, *plain]
    finally:
        for parameter, *before in held:
            parameter.put_back(*before)
        show_parts(model)


@contextmanager
def _plain_on_paper(model: nn.Module) -> Iterator[list[Part]]:
    """Let parameters and buffers of the plain modules inside be without numbers within the block."""
    twins: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            named = vars(module).get("_named", {})
            for register in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
                for name, tensor in register.items():
                    if tensor is not None and name not in named:
                        kept.append((register, name, tensor))
                        register[name] = twins.setdefault(id(tensor), _without_numbers(tensor))
        yield [Part((), twin) for twin in twins.values() if isinstance(twin, nn.Parameter)]
    finally:
        for register, name, tensor in kept:
            register[name] = tensor


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty_like(tensor, device="meta")
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def seconds_of(collective: Collective, sizes: Mapping[str, int], rates: Rates) -> float:
    """Predicted time of one exchange."""
    network = rates.of(collective.axes)
    if collective.kind == "all-reduce":
        ranks = math.prod(sizes[axis] for axis in collective.axes)
        return all_reduce_cost(collective.tensor_bytes, network, ranks).seconds
    return exchange_cost(collective.bytes_sent, collective.messages, network, rounds=1).seconds


def _brought(value: object) -> object:
    """A whole named tensor as this rank's part on paper."""
    if not isinstance(value, Tensor):
        return value
    scope = current()
    scope.axes(value.dims, "the sample's tensor")
    return Tensor(torch.empty(scope.local_shape(value.dims), dtype=value.dtype, device="meta"), value.dims)


def _row(line: Line, wide: int) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in line.collectives.items())
    cells = _cells(line.where, wide, line.flops, line.bytes_sent, line.messages, line.kept_bytes)
    return f"{cells}  {kinds + ': ' if kinds else ''}{line.code}"


def _cells(name: str, wide: int, flops: int, bytes_sent: int, messages: int, kept_bytes: int) -> str:
    return f"{name:<{wide}} {flops / 1e9:>9.3f} {bytes_sent / 1e6:>9.3f} {messages:>8} {kept_bytes / 1e6:>9.3f}"
