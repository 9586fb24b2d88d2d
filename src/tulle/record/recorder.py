"""`log`, and `Recorder`: writes what one rank does into the folder of a run, a JSON line a step.

Nothing is recorded, and no hook is there, unless the launcher named a folder in `TULLE_RUN_DIR`.

A step ends with `optimizer.step()`. Its line is written when the next forward begins, so that what a script logs
in between still belongs to it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import traffic
from tulle.engine import DataParallel
from tulle.environment import RUN_DIR, detect
from tulle.errors import DataError
from tulle.mesh import Mesh
from tulle.plan import Plan
from tulle.process_groups import backend_of
from tulle.profiling.samples import samples_in
from tulle.record.clock import StepClock
from tulle.record.observed import as_line
from tulle.timeline import Timeline
from tulle.whole_file import write_whole

TIMELINE = "TULLE_TIMELINE"
STOP_AFTER = "TULLE_STOP_AFTER"
"""Set by `tulle profile`: end the script, on all ranks alike, after so many steps."""
PREVIOUS = "previous-"
"""Before the name of a record that was there when the run began anew in a folder."""
_OPERATIONS = {
    "dense gradients": "all_reduce",
    "buffers": "broadcast",
    "initial parameters": "broadcast",
    "row counts": "all_gather",
    "network probe": "probe",
    "characteristics": "all_gather",
    "barrier": "probe",
}


def log(
    *,
    loss: float | Tensor | None = None,
    tokens: int | Tensor | None = None,
    total_steps: int | None = None,
    **values: float | str | Tensor,
) -> None:
    """Record numbers or texts of the current step; without `tulle run` it does nothing. Any rank may call it.

    What is logged after `optimizer.step()` and before the next forward belongs to the step that ended.

    A step ends with the `optimizer.step()` of a model that was given to `tulle.distribute`. In a script without such a
    model each call with a loss ends one.

    Args:
        loss: This rank's loss; of several in a step, those of its micro-batches say, the mean is recorded. It need not
            be given if the model returns its loss, and nothing else.
        tokens: Tokens, or samples, that this rank processed in the step; several calls add up.
        total_steps: How many steps the run will have, for the progress bar.
        **values: Numbers (`valid_loss=2.1`) for curves and the summary, or texts for the report.

    Raises:
        DataError: If something else is given where a number belongs.

    Example:
        >>> import tulle
        >>> tulle.log(loss=2.5, tokens=4096, learning_rate=1e-3)
    """
    recorder = current()
    if recorder is not None:
        recorder.log(loss, tokens, total_steps, values)


@cache
def current() -> Recorder | None:
    """This process's recorder, or None if nobody asked for a record."""
    folder = os.environ.get(RUN_DIR)
    if not folder:
        return None
    rank = dist.get_rank() if dist.is_initialized() else detect().rank
    return Recorder(Path(folder), rank, is_tracing=bool(os.environ.get(TIMELINE)))


class Recorder:
    """Writes what one rank does into the run's folder."""

    def __init__(self, folder: Path, rank: int, *, is_tracing: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._process = os.getpid()
        self._lines = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")
        self._timeline = Timeline(rank)
        self._engine: DataParallel | None = None
        self._plan: Callable[[], Plan] | None = None
        self._plan_written: Plan | None = None
        self._has_prediction = False
        self._step = 0
        self._open: dict[str, Any] = {}
        """What the line of this step has so far; it is open until the next forward, after the step has ended, too."""
        self._losses: list[float | Tensor] = []
        """That were logged in this step: one, or those of its micro-batches."""
        self._texts: dict[str, str] = {}
        self._is_ended = False
        self._clock = StepClock()
        self._models: WeakSet[nn.Module] = WeakSet()
        self._depth = 0
        """Forwards under way, one within the other: of models that were attached and are parts of another."""
        self._last: Optimizer | None = None
        """Whose step ends that of the run; None where nobody has attached a model, and a logged loss does."""
        self._stop_after = int(os.environ.get(STOP_AFTER, "0"))
        traffic.is_tracing = is_tracing
        if rank == 0:
            _show_reasons()
        atexit.register(self.close)

    def attach(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        mesh: Mesh,
        *,
        plan: Callable[[], Plan],
        engine: DataParallel,
    ) -> None:
        """Watch a model's steps.

        Args:
            model: Whose forward begins a step.
            optimizers: Whose last one's `step()` ends it.
            mesh: Where it runs.
            plan: Gives the plan in force.
            engine: Keeps the model in step.
        """
        self._plan, self._engine = plan, engine
        self._has_prediction = plan().prediction is not None
        self._models.add(model)
        model.register_forward_pre_hook(_forward_begins, with_kwargs=True)
        model.register_forward_hook(_forward_ends, always_call=True)  # also of one that raised
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
            optimizer.register_step_post_hook(self._after_optimizer)
        self._last = optimizers[-1]
        if self._rank == 0:
            backend = backend_of(mesh.axes[0].group, mesh.device.type)
            axes = {"axes": mesh.shape, "backend": backend, "device": str(mesh.device)}
            write_whole(self._folder / "mesh.json", json.dumps(axes) + "\n")

    def log(
        self,
        loss: float | Tensor | None,
        tokens: int | Tensor | None,
        total_steps: int | None,
        values: Mapping[str, float | str | Tensor],
    ) -> None:
        """Add to the step that is open; where no optimizer ends it, a loss does."""
        ends = loss is not None and self._last is None
        if ends and self._is_ended:
            self._write_step()
        if loss is not None:
            self._losses.append(_number("loss", loss))
        if tokens is not None:
            self._open["tokens"] = self._open.get("tokens", 0) + _number("tokens", tokens)
        if total_steps is not None:
            self._open["total_steps"] = total_steps
        for name, value in values.items():
            if isinstance(value, str):
                self._texts[name] = value
            elif value is not None:
                self._open.setdefault("values", {})[name] = _number(name, value)
        if ends:
            self._end_step()

    def resume(self, step: int) -> None:
        """Count on from a step, after a checkpoint was loaded, and take up the record of the steps before it."""
        if self._stop_after:
            self._stop_after += step - self._step
        self._step = step
        earlier = self._folder / f"{PREVIOUS}{Path(self._lines.name).name}"
        if self._lines.tell() == 0 and earlier.is_file():
            with earlier.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with suppress(ValueError, KeyError):  # the last line may be torn
                        if json.loads(line)["step"] <= step:
                            self._lines.write(line.rstrip("\n") + "\n")

    def close(self) -> None:
        """Write what is open; called when the process ends, not when one ends that it has forked."""
        if not self._lines.closed and os.getpid() == self._process:
            self._write_step()
            self._lines.close()
            if traffic.is_tracing:
                self._timeline.write(self._folder)
        atexit.unregister(self.close)

    def watches(self, module: nn.Module) -> bool:
        """Whether this very model was attached; its copies have its hooks too."""
        return module in self._models

    def _before_forward(self, module: nn.Module, arguments: object) -> None:
        if module.training and self._is_ended:
            self._write_step()
        if module.training and self._has_prediction:
            self._open["samples"] = self._open.get("samples", 0) + samples_in(arguments)
        self._depth += 1
        self._clock.begin_forward()

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        self._depth -= 1
        if self._depth or not module.training:
            return
        self._clock.end_forward()
        if isinstance(output, Tensor) and output.dim() == 0 and output.requires_grad:
            self._open.setdefault("loss", output.detach())

    def _before_optimizer(self, *_: object) -> None:
        self._clock.begin_optimizer()

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self._clock.end_optimizer(type(optimizer).__name__)
        if optimizer is self._last:
            self._end_step()

    def _end_step(self) -> None:
        self._step += 1
        self._open |= {
            "at": time.time(),
            **self._clock.end_step(),
            "traffic": self._traffic(),
            "memory_peak_bytes": _memory_peak_bytes(),
        }
        self._is_ended = True
        if self._stop_after:
            self._open["total_steps"] = self._stop_after
        if self._step == self._stop_after:
            raise SystemExit(0)

    def _traffic(self) -> dict[str, dict[str, Any]]:
        schemes = self._engine.schemes() if self._engine else {}
        recorded: dict[str, dict[str, Any]] = {}
        for label, count in traffic.take_labels().items():
            scheme, rows = schemes.get(label, (_OPERATIONS.get(label, "other"), None))
            recorded[label] = {"scheme": scheme, "bytes_sent": count.bytes_sent, "messages": count.messages}
            if rows is not None:
                recorded[label]["rows"] = rows
        return recorded

    def _write_step(self) -> None:
        step = max(1, self._step)
        if self._losses:
            self._open["loss"] = sum(map(_plain, self._losses)) / len(self._losses)
        lines = [{"kind": "text", "step": step, "name": name, "text": text} for name, text in self._texts.items()]
        if self._is_ended:
            lines.insert(0, {"kind": "step", "step": step} | _plain(self._open))
        elif "values" in self._open:  # logged without a step, by an evaluation alone, say
            lines.insert(0, {"kind": "values", "step": step, "values": _plain(self._open["values"])})
        observations = self._engine.ledger.take_observations() if self._engine else []
        lines += [as_line(observation, step) for observation in observations if self._rank == 0]
        for line in lines:
            self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        self._open, self._losses, self._texts, self._is_ended = {}, [], {}, False
        self._timeline.keep_spans()
        if self._rank == 0 and self._plan is not None:
            plan = self._plan()
            if plan != self._plan_written:
                plan.save(self._folder / "plan.json")
                self._plan_written = plan


def _show_reasons() -> None:
    """Under `tulle run`, rank 0 says what is chosen and why, unless the script has set up logging itself."""
    logger = logging.getLogger("tulle")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[tulle] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


# Functions of the module, not bound methods: a model that is copied or pickled takes its hooks along.
def _forward_begins(module: nn.Module, args: object, kwargs: object) -> None:
    recorder = current()
    if recorder is not None and recorder.watches(module):
        recorder._before_forward(module, (args, kwargs))


def _forward_ends(module: nn.Module, arguments: object, output: object) -> None:
    recorder = current()
    if recorder is not None and recorder.watches(module):
        recorder._after_forward(module, arguments, output)


def _number(name: str, value: object) -> float | Tensor:
    """A number as it is now, whatever becomes of its tensor; one on a device is fetched when it is written."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if not isinstance(value, Tensor | str):
        with suppress(TypeError, ValueError):
            return value if isinstance(value, int) else float(cast("Any", value))
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise DataError(f"tulle.log was given {name}={shown}, expected one number: its mean, say")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _memory_peak_bytes() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
