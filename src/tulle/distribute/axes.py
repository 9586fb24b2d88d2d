"""`Axes`: what each axis of a mesh is for, seen from this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tulle.comm import lane, raise_together
from tulle.errors import MeshError, TulleError
from tulle.memory.ahead import sharing_within_hosts
from tulle.memory.options import HOST
from tulle.mesh import Axis, Mesh, axis_of
from tulle.plan import Memory
from tulle.plan.plan import DATA, MODEL, PIPE

SAVING = "checkpoint"
"""The lane on which checkpoints travel."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a mesh along which `distribute` works.

    Args:
        data: Whose ranks hold replicas of what this rank has; of size 1 if the mesh has none.
        pipe: Whose ranks hold stages, None if there is one rank only.
        model: Over which layers are split, None if there is one rank only.
        whole: All ranks.
        alone: This rank.
    """

    data: Axis
    pipe: Axis | None
    model: Axis | None
    whole: Axis
    alone: Axis

    @staticmethod
    def of(mesh: Mesh) -> Axes:
        """Those of a mesh. Costs no communication.

        Raises:
            MeshError: If it has another axis of more than one rank.
        """
        if not isinstance(mesh, Mesh):
            raise MeshError(f"tulle was given a {type(mesh).__name__} as mesh, expected what tulle.init returns")
        for name, size in mesh.shape.items():
            if name not in (DATA, PIPE, MODEL) and size > 1:
                raise MeshError(
                    f"the mesh has axis {name}={size}; tulle.distribute knows {DATA!r}, {PIPE!r} and {MODEL!r}: give "
                    "tulle.init one of these names, or use tulle.tensor_parallel, tulle.pipeline or tulle.named"
                )
        return Axes(
            _named(mesh, DATA) or _alone(mesh),
            _named(mesh, PIPE, least=2),
            _named(mesh, MODEL, least=2),
            _whole(mesh),
            _alone(mesh),
        )

    def make_lanes(self) -> None:
        """Make what will be wanted between stages. Every rank must call it, before stages make groups of their own.

        torch names a process group by how many this process has, so that members who have different numbers never meet.
        """
        for axis in (self.pipe, self.whole):
            if axis is not None:
                lane(axis, SAVING)

    def spreading(self, memory: Memory) -> list[Axis]:
        """Along which ranks have different gradients, or parts of one. Every rank must call it."""
        sharing = self.sharing(memory)
        return [*([] if sharing is None else [sharing]), *self.splitting]

    def sharing(self, memory: Memory) -> Axis | None:
        """Over which ranks of axis `data` parameters are shared out, if they are. Every rank must call it."""
        if not memory.full_shard or self.data.size == 1:
            return None
        return sharing_within_hosts(self.data) if memory.full_shard == HOST else self.data

    @property
    def splitting(self) -> list[Axis]:
        """Along which the model is not whole on one rank."""
        return [axis for axis in (self.model, self.pipe) if axis is not None]


@contextmanager
def alike(axes: Axes, label: str) -> Iterator[None]:
    """Raise on every rank of the mesh what the body raises on any."""
    error: TulleError | None = None
    try:
        yield
    except TulleError as found:
        error = found
    raise_together(error, axes.whole, label=label)


def _named(mesh: Mesh, name: str, *, least: int = 1) -> Axis | None:
    return mesh[name] if name in mesh and mesh[name].size >= least else None


def _alone(mesh: Mesh) -> Axis:
    """An axis of this rank only: nothing is ever sent along it, so that it needs no process group of its own."""
    kept = mesh.axes[0].kept
    if DATA not in kept:
        first = mesh.axes[0]
        kept[DATA] = Axis(DATA, 0, 1, (mesh.rank,), first.group, mesh.device, first.timeout_s)
    return kept[DATA]


def _whole(mesh: Mesh) -> Axis:
    """All ranks as one axis, made once: lanes and what is kept with it must stay as long as the mesh."""
    longest = max(mesh.axes, key=lambda axis: axis.size)
    if longest.size == mesh.size:
        return longest
    kept = mesh.axes[0].kept
    if Axes not in kept:
        kept[Axes] = axis_of(name="mesh")
    return kept[Axes]
