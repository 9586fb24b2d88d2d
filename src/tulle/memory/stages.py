"""`count_stages`: what each stage of a model needs, counted while one process runs all of it.

Every storage counts at the stage that makes it, and, from when another stage reads it, there too, as it is sent there.
A stage's operations in forward are those within its modules; between modules those of the latest stage among the
arguments, as the pipeline runs them; in backward those of the graph's nodes that it made, which autograd numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tulle.memory.estimate import Counted, Loss, Phases, prepare, tensor_bytes
from tulle.memory.options import Memory
from tulle.memory.recompute import call
from tulle.traits import states_of

_autograd: Any = vars(torch._C)["_autograd"]


@dataclass(frozen=True, slots=True)
class Stages:
    """How a model is cut: into stages of a pipeline, and layers that are split within them.

    Args:
        modules: Stage of each placed module, by name.
        parameters: Stages that hold each parameter and buffer, by name.
        count: How many stages.
        split: Names of modules that are split over an axis.
        ranks: Of that axis.
        micro_batches: How many follow each other in a step.
    """

    modules: Mapping[str, int]
    parameters: Mapping[str, Sequence[int]]
    count: int
    split: Sequence[str] = ()
    ranks: int = 1
    micro_batches: int = 1


@dataclass(slots=True)
class _Place:
    """Where the program is: a stage, None between modules; and the share of it that one rank of the split axis has."""

    stage: int | None
    share: float


class StageBytes(TorchDispatchMode):
    """Within this context, what operations give is counted at its stage for as long as it lives.

    Args:
        device_type: Tensors elsewhere do not count.
        stages: How many.
    """

    def __init__(self, device_type: str, stages: int) -> None:
        super().__init__()
        self.now_bytes, self.peak_bytes = [0.0] * stages, [0.0] * stages
        self.place = _Place(None, 1.0)
        self._device_type = device_type
        self._homes: dict[int, tuple[ref[torch.UntypedStorage], dict[int, float]]] = {}
        self._of_node: dict[int, _Place] = {}
        self._last = _Place(0, 1.0)

    def add(self, tensors: Iterable[Tensor], place: _Place) -> None:
        """Count tensors at a stage."""
        for tensor in tensors:
            if tensor.device.type == self._device_type and tensor.layout == torch.strided:
                self._count(tensor.untyped_storage(), place)

    def restart_peak(self) -> None:
        """Let the peaks be those from here on."""
        self.peak_bytes = list(self.now_bytes)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it reads and gives."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        node = torch._C._current_autograd_node()
        if node is not None and self.place.stage is None:
            place = self._of_node.get(node._sequence_nr(), self._last)
        elif self.place.stage is None:
            place = _Place(max((self._latest(leaf) for leaf in given), default=self._last.stage or 0), self.place.share)
        else:
            place = _Place(self.place.stage, self.place.share)
        self._last = place
        self._of_node[_autograd._get_sequence_nr() - 1] = place
        self.add(given, place)
        result = func(*args, **(kwargs or {}))
        self.add((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), place)
        return result

    def _latest(self, tensor: Tensor) -> int:
        found = self._homes.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return next(iter(found[1])) if found is not None and found[0]() is not None else 0

    def _count(self, storage: torch.UntypedStorage, place: _Place) -> None:
        key, stage = storage._cdata, place.stage or 0
        known = self._homes.get(key)
        if known is None or known[0]() is None:
            homes: dict[int, float] = {}

            def gone(_: object) -> None:
                for at, size in homes.items():
                    self.now_bytes[at] -= size

            known = self._homes[key] = ref(storage, gone), homes
        if stage not in known[1]:
            known[1][stage] = storage.nbytes() * place.share
            self.now_bytes[stage] += known[1][stage]
            self.peak_bytes[stage] = max(self.peak_bytes[stage], self.now_bytes[stage])


def count_stages(stages: Stages) -> Counted[list[Phases]]:
    """What counts the stages of a model, for `count_phases`."""

    def count(model: nn.Module, optimizer: Optimizer, sample: Any, options: Memory, loss: Loss) -> list[Phases]:
        device_type, sample = prepare(model, optimizer, sample, options)
        live = StageBytes(device_type, stages.count)
        shares = {name: 1.0 for name, _ in model.named_parameters()}
        for name in shares:
            if any(name.startswith(f"{module}.") for module in stages.split):
                shares[name] = 1 / stages.ranks
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            for stage in stages.parameters.get(name) or range(stages.count):
                live.add([tensor], _Place(stage, shares.get(name, 1.0)))
        for stage in range(stages.count):
            live.add((leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)), _Place(stage, 1.0))
        base = list(live.now_bytes)
        activations = backward = [0.0] * stages.count
        with live, _watched(model, stages, live):
            for _ in range(min(2, stages.micro_batches)):  # the second adds to gradients that are there
                before = list(live.now_bytes)
                live.restart_peak()
                value = loss(call(model, sample))
                activations = _difference(live.now_bytes, before)
                value.backward()
                backward = _difference(live.peak_bytes, base)
                del value
        return [
            _phases(model, optimizer, stages, shares, stage, (activations[stage], backward[stage]))
            for stage in range(stages.count)
        ]

    return count


def _difference(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(now, before, strict=True)]


def _phases(
    model: nn.Module,
    optimizer: Optimizer,
    stages: Stages,
    shares: Mapping[str, float],
    stage: int,
    counted: tuple[float, float],
) -> Phases:
    here = [
        (parameter, shares[name])
        for name, parameter in model.named_parameters()
        if stage in (stages.parameters.get(name) or (stage,))
    ]
    buffers = [b for name, b in model.named_buffers() if stage in (stages.parameters.get(name) or (stage,))]
    trained = [(parameter, parameter.grad, share) for parameter, share in here if parameter.grad is not None]
    trained_bytes = sum(tensor_bytes([parameter]) * share for parameter, _, share in trained)
    gradients = sum(tensor_bytes([grad if grad.is_sparse else parameter]) * share for parameter, grad, share in trained)
    state_share, step_share = state_of(optimizer)
    return Phases(
        round(sum(tensor_bytes([parameter]) * share for parameter, share in here)) + tensor_bytes(buffers),
        round(gradients),
        round(trained_bytes * state_share),
        round(counted[0]),
        round(counted[1]),
        round(trained_bytes * step_share),
        round(trained_bytes),
    )


def state_of(optimizer: Optimizer) -> tuple[float, float]:
    """What an optimizer's state takes, and what its step takes for a while, as a multiple of what it steps."""
    optimizer.step()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    stepped_bytes = tensor_bytes(parameters) or 1
    entries = [
        entry for state in states_of(optimizer).values() for entry in state.values() if isinstance(entry, Tensor)
    ]
    state_bytes = tensor_bytes(entries)
    live = StageBytes(parameters[0].device.type if parameters else "cpu", 1)
    gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    live.add([*parameters, *gradients, *entries], _Place(0, 1.0))
    before = live.now_bytes[0]
    with live:
        optimizer.step()
    return state_bytes / stepped_bytes, (live.peak_bytes[0] - before) / stepped_bytes


@contextmanager
def _watched(model: nn.Module, stages: Stages, live: StageBytes) -> Iterator[None]:
    """Have the counter know in which module the program is."""
    stack: list[_Place] = []
    modules = {model.get_submodule(name): (stage, 1.0) for name, stage in stages.modules.items()}
    splits = {model.get_submodule(name) for name in stages.split}

    def enter(module: nn.Module, _: object) -> None:
        stack.append(live.place)
        stage = modules[module][0] if module in modules else live.place.stage
        live.place = _Place(stage, 1 / stages.ranks if module in splits else live.place.share)

    def leave(_: nn.Module, __: object, ___: object) -> None:
        live.place = stack.pop()

    hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in {*modules, *splits}]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in {*modules, *splits}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
