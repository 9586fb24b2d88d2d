"""A network for tests that let `auto` choose but do not ask by what: to measure one takes up to a second of each."""

from unittest import mock

from tulle.cost import Network
from tulle.distribute.axes import Axes
from tulle.mesh import Axis, Mesh
from tulle.workload import Cluster, Machine

GIGABIT = Network(
    latency_s=5e-4,
    bandwidth_bytes_per_s=1.2e8,
    sum_bytes_per_s=4e9,
    copy_bytes_per_s=1e9,
    number_s=3e-8,
)


def give_network(axis: Axis, network: Network = GIGABIT) -> Axis:
    """Have the axis taken for measured. Every rank must call it, before anything asks for the network."""
    axis.measured.append(network)
    return axis


def give_cluster(mesh: Mesh) -> mock._patch:
    """Have all axes taken for measured, and within the context that is returned machines too. Every rank must call."""
    for axis in (*mesh.axes, Axes.of(mesh).whole):
        if not axis.measured:
            give_network(axis)
    cluster = Cluster(1, mesh.size, Machine(1e10, 1e10), GIGABIT, GIGABIT)
    return mock.patch("tulle.profiling.measure.measure_cluster", return_value=cluster)
