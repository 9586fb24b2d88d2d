"""A network for tests that let `auto` choose but do not ask by what: to measure one takes up to a second of each."""

from tulle.cost import Network
from tulle.mesh import Axis

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
