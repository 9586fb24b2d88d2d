"""`optimizer_profile`: what an optimizer keeps, which rows it moves, and what it takes for dense and for sparse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.memory.estimate import tensor_bytes
from tulle.profiling.laps import now_on
from tulle.profiling.steps import Twin
from tulle.traits import states_of
from tulle.workload import OptimizerProfile

_REPEATS = 5
_ONE_IN = 8
_TRIAL_ROWS, _TRIAL_WIDTH = 1024, 256
_NARROWER, _NARROWED_ROWS, _NARROWED_BYTES, _TURNS = 4, 8192, 2**24, 8
"""How many times as narrow a table is stepped as it is, of so many rows or bytes, in so many turns."""


@dataclass(slots=True)
class _Work:
    """Bytes that optimizers' steps handle, and the seconds that they take for these, and for all.

    Of the steps of one process some is for adding up the rows of sparse gradients, which tulle does on their way.
    """

    dense_bytes: int = 0
    rows_bytes: int = 0
    tables: int = 0
    dense_s: float = 0.0
    fixed_s: float = 0.0
    rows_s: float = 0.0
    whole_s: float = 0.0
    """With gradients whose rows have been added up."""
    as_given_s: float = 0.0
    """With gradients as backward gives them."""

    @property
    def table_s(self) -> float:
        """What each sparse gradient takes however few its rows are, launching its kernels say."""
        return max(0.0, self.whole_s - self.dense_s - self.rows_s) / max(1, self.tables)


def optimizer_profile(twin: Twin, step_s: float) -> OptimizerProfile:
    """What the optimizers of a twin that has stepped keep and take.

    Args:
        twin: Takes a few more steps.
        step_s: Of all its optimizers, as it was seen in whole steps.
    """
    twin.backward(twin.samples[0])
    owners = [one for one in twin.optimizers if any(_is_sparse(p) for p in _parameters(one))] or twin.optimizers
    row_fixed_share = _row_fixed_share(twin)
    work = _measured(twin)
    scale = step_s / work.as_given_s if work.as_given_s > 0 else 0.0
    updates_all_rows = all(_moves_untouched_rows(one) for one in owners)
    twin.clear()
    return OptimizerProfile(
        _state_share(twin.optimizers),
        scale * work.dense_s / work.dense_bytes if work.dense_bytes else 0.0,
        updates_all_rows,
        scale * work.rows_s / work.rows_bytes if work.rows_bytes else None,
        scale * work.table_s if work.tables else 0.0,
        min(1.0, work.fixed_s / work.dense_s) if work.dense_s else 0.0,
        row_fixed_share,
    )


def tried(optimizers: Sequence[Optimizer], device: torch.device) -> OptimizerProfile:
    """The same of optimizers whose parameters have no memory: others of their classes step a small one on a device."""
    parameter = nn.Parameter(torch.zeros(_TRIAL_ROWS, _TRIAL_WIDTH, device=device))
    optimizer, ones = _another(optimizers[0], parameter), torch.ones_like(parameter)
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        parameter.grad = ones.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else ones
        begin_s = now_on(device)
        optimizer.step()
        seconds.append(now_on(device) - begin_s)
    share = _state_share([optimizer])
    return OptimizerProfile(share, min(seconds) / parameter.nbytes, _moves_untouched_rows(optimizers[0]))


def _measured(twin: Twin) -> _Work:
    """Steps with all gradients, with few rows of the sparse ones, and with the dense ones only."""
    work = _Work()
    for optimizer in twin.optimizers:
        gradients = {p: p.grad for p in _parameters(optimizer) if p.grad is not None}
        sparse = {p: grad.coalesce() for p, grad in gradients.items() if grad.is_sparse}
        dense = {p: grad for p, grad in gradients.items() if p not in sparse}
        few = {p: _few_rows(grad) for p, grad in sparse.items()}
        cases = [dense | sparse, gradients, dense | few, dense] if sparse else [gradients]
        seconds = _seconds(twin, optimizer, cases)
        whole_s, as_given_s, few_s, dense_s = seconds if sparse else seconds * 4
        work.whole_s += whole_s
        work.as_given_s += max(as_given_s, whole_s)  # which has rows to add up besides
        rows_bytes, kept_bytes = (sum(grad.values().nbytes for grad in some.values()) for some in (sparse, few))
        if sparse:
            work.rows_s += min(whole_s, max(0.0, whole_s - few_s) * rows_bytes / max(1, rows_bytes - kept_bytes))
        if dense:
            work.dense_s += dense_s
            work.fixed_s += _fixed_s(twin, optimizer, len(dense))
        work.rows_bytes += rows_bytes
        work.tables += len(sparse)
        work.dense_bytes += sum(p.nbytes for p in dense)
    return work


def _seconds(twin: Twin, optimizer: Optimizer, cases: Sequence[Mapping[Tensor, Tensor]]) -> list[float]:
    """Of a step with each of some sets of gradients, in turns: the least, as what disturbs a step makes it longer."""
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(_REPEATS):
        for gradients, of_case in zip(cases, seconds, strict=True):
            for parameter in _parameters(optimizer):
                parameter.grad = gradients.get(parameter)
            of_case.append(twin.seconds(optimizer.step))
    return [min(of_case) for of_case in seconds]


def _fixed_s(twin: Twin, optimizer: Optimizer, count: int) -> float:
    """Seconds of one like it for as many parameters that are next to nothing."""
    parameters = [nn.Parameter(torch.zeros(1, device=twin.device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        other = _another(optimizer, *parameters)
        other.step()
        return min(twin.seconds(other.step) for _ in range(_REPEATS))
    except Exception:  # an optimizer that is made, or steps, in a way of its own
        return 0.0


def _row_fixed_share(twin: Twin) -> float:
    """Of what rows take, that part which fewer columns of them do not make shorter: of the widest sparse gradient.

    One like its optimizer steps tables of as many columns and of fewer, for all of their rows and for few.
    """
    sparse = [
        (p, one)
        for one in twin.optimizers
        for p in _parameters(one)
        if _is_sparse(p) and p.dim() == 2 and p.shape[1] >= _NARROWER
    ]
    if not sparse:
        return 0.0
    like, optimizer = max(sparse, key=lambda pair: pair[0].shape[1])
    rows = max(_ONE_IN, min(_NARROWED_ROWS, _NARROWED_BYTES // (like.shape[1] * like.itemsize)))
    widths = like.shape[1], like.shape[1] // _NARROWER
    try:
        steps = [
            _step_of(optimizer, like.new_zeros(count, width)) for width in widths for count in (rows, rows // _ONE_IN)
        ]
        turns = [[twin.seconds(step) for step in steps] for _ in range(_TURNS)]
    except Exception:  # an optimizer that is made, or steps, in a way of its own
        return 0.0
    whole_s, few_s, narrow_s, narrow_few_s = map(min, zip(*turns[1:], strict=True))
    rows_s, narrower = max(0.0, whole_s - few_s), widths[1] / widths[0]
    share = max(0.0, narrow_s - narrow_few_s) / rows_s if rows_s else 0.0
    return min(1.0, max(0.0, (share - narrower) / (1 - narrower)))


def _step_of(optimizer: Optimizer, table: Tensor) -> Callable[[], object]:
    """A step of one like it for a gradient that has all rows of a table."""
    parameter = nn.Parameter(table)
    rows = torch.arange(len(table), device=table.device).unsqueeze(0)
    ones = torch.ones_like(table)
    parameter.grad = torch.sparse_coo_tensor(rows, ones, table.shape, is_coalesced=True, check_invariants=False)
    return _another(optimizer, parameter).step


def _few_rows(grad: Tensor) -> Tensor:
    """Every so many row of a gradient."""
    kept = torch.arange(0, grad._nnz(), _ONE_IN, device=grad.device)
    # Not by strides: torch's sparse addition of one row with the stride of eight writes past its memory.
    indices, values = grad.indices().index_select(1, kept), grad.values().index_select(0, kept)
    return torch.sparse_coo_tensor(indices, values, grad.shape, is_coalesced=True, check_invariants=False)


def _state_share(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of state for one byte of the parameters that have stepped."""
    state_bytes = parameters_bytes = 0
    for optimizer in optimizers:
        for parameter, state in states_of(optimizer).items():
            kept = [entry for entry in state.values() if isinstance(entry, Tensor) and entry.dim()]
            state_bytes += tensor_bytes(kept)  # the momentum of a sparse gradient is sparse
            parameters_bytes += parameter.nbytes
        stateless = [p for p in _parameters(optimizer) if p not in optimizer.state and p.requires_grad]
        parameters_bytes += sum(parameter.nbytes for parameter in stateless)
    return state_bytes / parameters_bytes if parameters_bytes else 0.0


def _moves_untouched_rows(optimizer: Optimizer) -> bool:
    """Whether a row moves whose gradient is zero, after steps in which it was not."""
    parameter = nn.Parameter(torch.ones(2, 2))
    try:
        own = _another(optimizer, parameter)
        for rows in ([0, 1], [0]):
            before = parameter.detach().clone()
            index = torch.tensor([rows])
            sparse = torch.sparse_coo_tensor(index, torch.ones(len(rows), 2), (2, 2), check_invariants=True)
            parameter.grad = sparse if type(optimizer) is torch.optim.SparseAdam else sparse.to_dense()
            own.step()
        return not torch.equal(parameter[1], before[1])
    except Exception:  # an optimizer that is made, or steps, in a way of its own
        return True


def _another(optimizer: Optimizer, *parameters: nn.Parameter) -> Optimizer:
    """One of the same class and settings over other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    return type(optimizer)([*parameters], **{name: one for name, one in optimizer.defaults.items() if name in known})


def _is_sparse(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
