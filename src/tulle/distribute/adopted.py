"""`Distributed`: what a model's class gains by `distribute`, and the hooks by which its tables are fed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import eager, traffic
from tulle.derived import Copied, derived, is_derived
from tulle.distribute.axes import Axes
from tulle.engine import ENGINE, TAKE_PLAIN, DataParallel, SplitTables, adopt, check_not_captured, engine_of
from tulle.errors import MeshError, ModelError
from tulle.mesh import Mesh
from tulle.plan import Plan
from tulle.tables import split_of, table_modules

_CLASS = "_tulle_class"
"""Where a distributed model keeps the class that it was given with."""
_PLAN, _AXES = "_tulle_plan", "_tulle_axes"


class Distributed:
    """What `distribute` adds to a model's class, as `fully_shard` does."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank within this context, without communication, as DDP's `no_sync`.

        The first backward outside of it averages the sums over the ranks. To accumulate gradients over several
        micro-batches, run all but the last within, forward and backward: as under DDP, what ran forward before it is
        averaged all the same.
        """
        with self.__dict__[ENGINE].syncing.off():
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001 - torch's
        """Move or convert, as `model.to` does: of what lives at other stages there is nothing to move."""
        if self.__dict__[_AXES].pipe is not None:
            fn = partial(_apply_here, fn)
        return cast("Any", super())._apply(fn, recurse)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        """What DistributedDataParallel asks a model for before it sends anything."""
        return _refuse_ddp()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copy, or a pickle, is the plain model that was given to `distribute`.

        Raises:
            ModelError: If it is pickled, and parts of it are of classes that no pickle finds, or on other ranks.
        """
        given = super().__getstate__()
        kept = _as_given(given if isinstance(given, dict) else self.__dict__)
        plain = self.__dict__[_CLASS]
        if is_derived(plain) or self.__dict__[_AXES].splitting:
            return _empty_copy, (Copied(plain.__name__), plain), kept
        return _empty, (plain,), kept

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` compiles: the model that was given, with the parameters that are kept in step.

        Raises:
            ModelError: If a rank has parts of it, or updates wait until somebody reads by way of Python.
        """
        engine, axes, plain = self.__dict__[ENGINE], self.__dict__[_AXES], self.__dict__[_CLASS]
        is_whole = not axes.splitting and not self.__dict__[_PLAN].memory.full_shard and engine.split_tables is None
        if not is_whole or engine.late is not None or is_derived(plain):
            raise ModelError(
                f"a {plain.__name__} was to be scripted of which a rank may have parts, or updates that wait until "
                f"parameters are read, and torch.jit reads what lies here: {TAKE_PLAIN}"
            )
        given = cast("nn.Module", self)
        return copy.deepcopy(given, {id(one): one for one in (*given.parameters(), *given.buffers())})


class DistributedWithParts(Distributed):
    """What it adds to the class of a model with split tables."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, to whose code these have the shape of the whole until it returns, or is interrupted.

        A hook would not see the end of a call that Ctrl-C ends.
        """
        check_not_captured()
        with self.__dict__[ENGINE].split_tables.forward():
            return cast("Any", super()).__call__(*args, **kwargs)


def _apply_here(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What becomes of a tensor; of one on device meta, which torch would not move, its dtype alone."""
    return tensor.to(fn(tensor.new_empty(0, device="cpu")).dtype) if tensor.is_meta else fn(tensor)


def _refuse_ddp() -> Iterator[str]:
    """Raise when it is iterated, and not when somebody looks at all that a model has."""
    yield from ()
    raise ModelError(
        "the model is distributed already, and DistributedDataParallel would write rank 0's parts of split tables over "
        "those of others: leave it out"
    )


def plan_of(model: nn.Module) -> Plan:
    """The plan that a model was distributed by."""
    return model.__dict__[_PLAN]


def axes_of(model: nn.Module) -> Axes | None:
    """The axes along which a model was distributed, or None if it was not."""
    return model.__dict__.get(_AXES)


def is_distributed(model: nn.Module) -> bool:
    """Whether a model was given to `distribute` before."""
    return axes_of(model) is not None


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh on which a model was distributed, as where `tulle.distribute` chose it.

    Raises:
        MeshError: If it was not.
    """
    axes = axes_of(model)
    if axes is None:
        raise MeshError(f"the {type(model).__name__} is on no mesh yet: give it to tulle.distribute")
    found = [axis for axis in (axes.pipe, axes.data, axes.model) if axis is not None]
    return Mesh(tuple(found), axes.whole.rank, axes.whole.size, axes.whole.device)


def adopt_model(model: nn.Module, engine: DataParallel, plan: Plan, axes: Axes) -> None:
    """Have a model belong to an engine: its class gains `no_sync`, its split tables look up over the ranks.

    Args:
        model: The model.
        engine: Keeps it in step.
        plan: That was put on it.
        axes: Along which.
    """
    if engine.split_tables is not None:
        for _, module, table in table_modules(model):
            if split_of(table) is not None:
                adopt(module, engine.split_tables)
        if axes.pipe is None:  # calls of several micro-batches are under way at once
            model.register_forward_pre_hook(cast("Any", _begin_call), with_kwargs=True)
            model.register_forward_hook(cast("Any", _end_call), always_call=True)
    if axes.pipe is None and engine.home.size > 1:  # gradients of steps of stages travel at their end
        model.register_forward_pre_hook(_begin_forward)
    if plan.memory.full_shard:  # which sends in forward
        model.register_forward_pre_hook(_begin_step)
    plain = type(model)
    # Past Module.__setattr__, which is for parameters, buffers and submodules.
    model.__dict__.update({ENGINE: engine, _PLAN: plan, _AXES: axes, _CLASS: plain})
    added = Distributed if engine.split_tables is None else DistributedWithParts
    object.__setattr__(model, "__class__", derived(added, plain, name=plain.__name__, module=plain.__module__))


def fetch_after_steps(optimizers: Sequence[Optimizer], engine: DataParallel) -> None:
    """Have the rows of the next step fetched when the last optimizer of split tables has stepped."""
    tables = engine.split_tables
    assert tables is not None, "called for models with split tables"
    parted = {id(table.parameter) for table in tables.tables.values()}
    stepping = [one for one in optimizers if parted & {id(p) for group in one.param_groups for p in group["params"]}]
    waiting = {id(one) for one in stepping}

    @eager
    def stepped(optimizer: Optimizer, *_: object) -> None:
        waiting.discard(id(optimizer))
        if not waiting:
            waiting.update(id(one) for one in stepping)
            tables.after_step()

    for one in stepping:
        one.register_step_post_hook(stepped)


def refuse_hooks(engine: DataParallel) -> None:
    """Have split tables refuse what is put on their gradients from now on: in backward there are none."""
    if engine.split_tables is not None and engine.axis.size > 1:
        for name, table in engine.split_tables.tables.items():
            for register in ("register_hook", "register_post_accumulate_grad_hook"):
                setattr(table.parameter, register, partial(_refuse_hook, name))


def _refuse_hook(name: str, *_: object) -> NoReturn:
    raise ModelError(
        f"a hook on {name!r} would see no gradient, because the table is split and gradients of its rows go to their "
        "owners: put it there before tulle.distribute, which then keeps the table whole, or look at .grad after "
        "backward"
    )


# Functions of the model, not bound methods: a model that is pickled takes hooks of its modules along, not its engine.
@eager
def _begin_call(model: nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
    if (tables := _split_tables_of(model)) is not None and model.training and torch.is_grad_enabled():
        tables.begin_call((arguments, keywords))


def _begin_forward(model: nn.Module, *_: object) -> None:
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (engine := engine_of(model)) is not None:
        engine.syncing.begin_forward()


@eager
def _begin_step(model: nn.Module, *_: object) -> None:
    """Have errors in forward speak of the step that it begins, as those in backward do, and not of the last one."""
    if (engine := engine_of(model)) is not None and torch.is_grad_enabled():
        traffic.step = engine.steps + 1


@eager
def _end_call(model: nn.Module, *_: object) -> None:
    if (tables := _split_tables_of(model)) is not None:
        tables.end_call()


def _split_tables_of(model: nn.Module) -> SplitTables | None:
    engine = engine_of(model)
    return None if engine is None else engine.split_tables


class _Modules(dict[str, nn.Module]):
    """The modules of a distributed model, which are copied without our hooks: `torch.jit.script` compiles hooks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Module]:
        copied = {name: copy.deepcopy(module, memo) for name, module in self.items()}
        for module in {one for child in copied.values() if child is not None for one in child.modules()}:
            module.__dict__.update(_hooks_of_others(module.__dict__))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


def _as_given(state: dict[str, Any]) -> dict[str, Any]:
    """Of a distributed model's attributes those that it was given with."""
    kept = {name: value for name, value in state.items() if name not in (ENGINE, _PLAN, _AXES, _CLASS)}
    return kept | _hooks_of_others(kept) | {"_modules": _Modules(kept["_modules"])}


def _hooks_of_others(state: dict[str, Any]) -> dict[str, Any]:
    """Of a module's hooks around its forward those that are not tulle's."""
    found = {name: type(state[name])() for name in ("_forward_pre_hooks", "_forward_hooks")}
    for name, hooks in found.items():
        hooks.update((n, hook) for n, hook in state[name].items() if not _is_ours(hook))
    return found


def _is_ours(hook: object) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("tulle.")


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _empty_copy(_: Copied, kind: type[nn.Module]) -> nn.Module:
    return _empty(kind)
