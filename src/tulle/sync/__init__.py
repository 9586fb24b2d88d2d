"""Gradients of replicated parameters: one file a scheme, the choice among them, and the sum of a step's tables."""

from tulle.sync.all_reduce import all_reduce
from tulle.sync.characteristics import characteristics, gather_presence
from tulle.sync.chooser import Chooser
from tulle.sync.ddp_hook import DDPState, ddp_hook
from tulle.sync.packet import Packet, Room, next_packet
from tulle.sync.reduce import (
    ABSENT,
    COUNTS,
    DENSE,
    Gradient,
    Routes,
    announce,
    announce_counts,
    count,
    indices_of,
    route,
    sum_gradients,
)
from tulle.sync.schemes import (
    AUTO,
    DENSIFY,
    FLAT,
    SCHEMES,
    Choice,
    check_scheme,
    choose,
    choose_together,
    compared,
    scheme_named,
)
from tulle.sync.table import Table, WireDtype, as_wire_dtype

__all__ = [
    "ABSENT",
    "AUTO",
    "COUNTS",
    "DENSE",
    "DENSIFY",
    "FLAT",
    "SCHEMES",
    "Choice",
    "Chooser",
    "DDPState",
    "Gradient",
    "Packet",
    "Room",
    "Routes",
    "Table",
    "WireDtype",
    "all_reduce",
    "announce",
    "announce_counts",
    "as_wire_dtype",
    "characteristics",
    "check_scheme",
    "choose",
    "choose_together",
    "compared",
    "count",
    "ddp_hook",
    "gather_presence",
    "indices_of",
    "next_packet",
    "route",
    "scheme_named",
    "sum_gradients",
]
