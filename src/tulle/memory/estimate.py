"""`estimate`: what a training step needs of memory on each rank, counted on tensors that have none.

The model and its optimizer are copied without memory, and one step of the copy runs: forward, backward, step, with the
kernels' own outputs and everything that autograd saves. What then differs between ranks is arithmetic.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tulle.errors import ModelError
from tulle.live import LiveBytes, measure_peak_bytes
from tulle.memory.offload import offload
from tulle.memory.options import Memory
from tulle.memory.pieces import BUCKET_BYTES
from tulle.memory.recompute import call, recompute, repeated
from tulle.traits import states_of

logger = logging.getLogger("tulle")

T = TypeVar("T")
Loss = Callable[[Any], Tensor]
"""From what the model gives to what backward starts from."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one rank.

    Args:
        parameters_bytes: Parameters and buffers, masters included.
        gradients_bytes: Gradients.
        optimizer_bytes: The optimizer's state.
        activations_bytes: What forward leaves for backward.
        peak_bytes: The most at any moment of a step, with all of these and what comes and goes.
        measured_bytes: The same as the allocator saw it, where it was asked.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    measured_bytes: int | None = None

    def __str__(self) -> str:
        """One line a part, in MiB."""
        return "\n".join(
            f"{field.name.removesuffix('_bytes'):<12}{getattr(self, field.name) / 2**20:>12,.1f} MiB"
            for field in fields(self)
            if getattr(self, field.name) is not None
        )


Counted = Callable[[nn.Module, Optimizer, Any, Memory, Loss], T]
"""Runs a step of a copy of a model and its optimizer, and counts."""


@dataclass(frozen=True, slots=True)
class Phases:
    """What one process needs: kinds of memory, and how much more there is at a time in each phase of a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    backward_bytes: int
    """Most in forward and backward beyond parameters: activations, gradients so far, and what comes and goes."""
    step_bytes: int
    """Most in the optimizer's step beyond parameters, gradients and state."""
    stepped_bytes: int
    """Of those parameters that the optimizer steps: what is frozen has no masters, and does not travel."""


def estimate(
    model: nn.Module,
    optimizer: Optimizer,
    sample: object,
    *,
    ranks: int = 1,
    options: Memory | None = None,
    loss: Loss | None = None,
) -> Estimate:
    """What a training step needs of memory on each rank. Nothing is sent, and the model stays as it is.

    Args:
        model: On any device, `meta` included; one that was split sends in forward, so its step runs for real, without
            the optimizer, and every rank must call it.
        optimizer: Over its parameters, before `shard_optimizer`.
        sample: One rank's batch, as the model is called with it: a mapping is passed as keywords, a tuple as
            positional arguments, anything else as the one argument.
        ranks: Of the data axis.
        options: What is done to save memory; None for nothing.
        loss: From the model's result to the loss; None for its `loss`, or else the sum of what it gives.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024, bias=False, device="meta")
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> found = estimate(model, optimizer, torch.empty(8, 1024, device="meta"))
        >>> found.parameters_bytes, found.optimizer_bytes // 2**20
        (4194304, 8)
    """
    chosen = options or Memory()
    phases = count_phases(model, optimizer, sample, chosen, loss or default_loss)
    groups = [tensor_bytes(model.get_submodule(name).parameters()) for name in repeated(model)]
    rest_bytes = max(0, phases.parameters_bytes - sum(groups))
    return on_a_rank(phases, ranks, chosen, 2 * max([*groups, 0]) + rest_bytes)


def on_a_rank(phases: Phases, ranks: int, options: Memory, gathered_bytes: int) -> Estimate:
    """What one process needs, dealt to ranks.

    Args:
        phases: Of one process.
        ranks: Among which it is dealt.
        options: How.
        gathered_bytes: Of parameters that are whole at a time under full sharding.
    """
    widening = torch.float32.itemsize // options.narrow.itemsize if options.narrow else 1
    if options.full_shard:
        dealt = _shared_out(phases, ranks, widening, gathered_bytes)
    elif options.shard_optimizer or options.narrow:
        dealt = _stepped_in_shares(phases, ranks if options.shard_optimizer else 1, widening)
    else:
        dealt = phases
    passing_bytes = max(dealt.backward_bytes, dealt.gradients_bytes + dealt.step_bytes)
    return Estimate(
        dealt.parameters_bytes,
        dealt.gradients_bytes,
        dealt.optimizer_bytes,
        dealt.activations_bytes,
        dealt.parameters_bytes + dealt.optimizer_bytes + passing_bytes,
    )


def _shared_out(phases: Phases, ranks: int, widening: int, gathered_bytes: int) -> Phases:
    """Of what every rank has a share, as wide as the optimizer steps it; wholes are made while their modules run."""
    gradients_bytes = phases.gradients_bytes * widening // ranks
    backward_bytes = phases.backward_bytes
    if ranks > 1:  # the gathered modules' parameters and gradients are whole, those of the others are not
        whole_bytes = min(gathered_bytes, phases.parameters_bytes)
        whole_gradients_bytes = min(whole_bytes, phases.gradients_bytes)
        backward_bytes += whole_bytes + whole_gradients_bytes + gradients_bytes - phases.gradients_bytes
    return replace(
        phases,
        parameters_bytes=(phases.parameters_bytes + phases.stepped_bytes * (widening - 1)) // ranks,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=phases.optimizer_bytes * widening // ranks,
        backward_bytes=backward_bytes,
        step_bytes=phases.step_bytes * widening // ranks,
    )


def _stepped_in_shares(phases: Phases, sharing: int, widening: int) -> Phases:
    """Parameters and gradients whole; of the optimizer's state and of masters, if they are narrow, a rank's share."""
    masters_bytes = phases.stepped_bytes * widening // sharing if widening > 1 else 0
    stepped_bytes = min(phases.stepped_bytes, BUCKET_BYTES)
    travelling_bytes = stepped_bytes + stepped_bytes // sharing if sharing > 1 or masters_bytes else 0
    step_bytes = phases.step_bytes * widening // sharing + masters_bytes  # masters have gradients too
    return replace(
        phases,
        parameters_bytes=phases.parameters_bytes + masters_bytes,
        optimizer_bytes=phases.optimizer_bytes * widening // sharing,
        step_bytes=max(step_bytes, travelling_bytes),
    )


def count_phases(model: nn.Module, optimizer: Optimizer, sample: object, options: Memory, loss: Loss) -> Phases:
    """What a step of one process needs; see `count_on_a_copy`."""
    return count_on_a_copy(model, optimizer, sample, options, loss, _count)


def count_on_a_copy(
    model: nn.Module, optimizer: Optimizer, sample: object, options: Memory, loss: Loss, count: Counted[T]
) -> T:
    """Run a step of a copy and count: a copy without memory, or a real one if the model sends, or reads values."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    random_state = torch.get_rng_state()
    try:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()) and device.type != "meta":
            raise NotImplementedError("fake kernels of recurrent layers do not tell what they keep")
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            with FakeCopyMode(fake):
                twins = copy.deepcopy((model, optimizer))
            inputs = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), sample)
            return count(*twins, inputs, options, loss)
    except Exception as problem:  # whatever an operator without values raises
        logger.info("a step of a %s is counted for real: %s", type(model).__name__, str(problem).split("\n", 1)[0])
    finally:
        twins = fake = None
        gc.collect()  # in circles they refer to the model's own parameters, which a pipeline could not place then
    try:
        return count(*copy.deepcopy((model, optimizer)), sample, options, loss)
    finally:
        torch.set_rng_state(random_state)


def default_loss(output: Any) -> Tensor:
    """A model's own loss, or the sum of what it gives."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    plain = dict(output) if isinstance(output, Mapping) else output
    leaves = [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ModelError(
            f"nothing that the model gives, a {type(output).__name__}, depends on its parameters: give loss=, a "
            "function from what it gives to the loss, and parameters of which some are trained (requires_grad)"
        )
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def prepare(model: nn.Module, optimizer: Optimizer, sample: Any, options: Memory) -> tuple[str, Any]:
    """Put options on a copy; give the type of its device and what it is called with."""
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    if options.narrow is not None:
        model.to(options.narrow)
        sample = tree_map_only(Tensor, lambda t: t.to(options.narrow) if t.is_floating_point() else t, sample)
    recompute(model, options.recompute)
    if device_type == "cuda":  # on a CPU there is no other memory to move to
        offload(model, options.offload)
    optimizer.zero_grad()
    return device_type, sample


def _count(model: nn.Module, optimizer: Optimizer, sample: Any, options: Memory, loss: Loss) -> Phases:
    device_type, sample = prepare(model, optimizer, sample, options)
    tensors = [*model.parameters(), *model.buffers()]
    inside_bytes = _inside_kernels(model, sample, loss)
    with LiveBytes(device_type) as live:
        live.add([*tensors, *(leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor))])
        base_bytes = live.now_bytes
        value = loss(call(model, sample))
        activations_bytes = live.now_bytes - base_bytes
        value.backward()
        backward_bytes = live.peak_bytes - base_bytes
        del value
        optimizer.step()  # makes its state
        live.restart_peak()
        before_bytes = live.now_bytes
        optimizer.step()
        step_bytes = live.peak_bytes - before_bytes
    entries = [entry for state in states_of(optimizer).values() for entry in state.values()]
    return Phases(
        tensor_bytes(tensors),
        tensor_bytes(p.grad for p in model.parameters() if p.grad is not None),
        tensor_bytes(entry for entry in entries if isinstance(entry, Tensor)),
        activations_bytes,
        max(backward_bytes, inside_bytes),
        step_bytes,
        tensor_bytes(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad),
    )


def _inside_kernels(model: nn.Module, sample: Any, loss: Loss) -> int:
    """Of recurrent layers what the allocator sees, as their kernels take memory that no operation shows; else 0."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    if not is_recurrent or device.type == "meta" or any(isinstance(p, FakeTensor) for p in model.parameters()):
        return 0
    peak_bytes = measure_peak_bytes(lambda: loss(call(model, sample)).backward(), device)
    model.zero_grad()
    return peak_bytes


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that some tensors lie in, each counted once."""
    strided = (part for one in tensors for part in ((one._indices(), one._values()) if one.is_sparse else (one,)))
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in strided}
    return sum(storages.values())
