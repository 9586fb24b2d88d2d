"""Exchanges among ranks of one host through memory that all of them map, instead of through the network."""

from tulle.shared_memory.exchanges import all_reduce, all_to_all
from tulle.shared_memory.meeting import do_share, meet, one_way, works_of
from tulle.shared_memory.neighbours import SWITCH
from tulle.shared_memory.one_way import Receiver, Sender
from tulle.shared_memory.region import flat_bytes, unseen
from tulle.shared_memory.works import Task, Work, Works

__all__ = [
    "SWITCH",
    "Receiver",
    "Sender",
    "Task",
    "Work",
    "Works",
    "all_reduce",
    "all_to_all",
    "do_share",
    "flat_bytes",
    "meet",
    "one_way",
    "unseen",
    "works_of",
]
