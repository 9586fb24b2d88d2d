"""Typed collectives over `torch.distributed`, each counting its bytes and messages; the network probe; the courier."""

from tulle.comm.agree import gather_values, raise_together
from tulle.comm.collectives import all_gather, all_reduce, barrier, broadcast
from tulle.comm.courier import Courier, Job
from tulle.comm.lane import hosts_of, lane, part
from tulle.comm.parts import all_gather_parts, all_to_all_parts, receive, send
from tulle.comm.pending import Deferred, Pending
from tulle.comm.probe import probe
from tulle.comm.scratch import release
from tulle.comm.traffic import Count, Traffic, now_s, traffic

__all__ = [
    "Count",
    "Courier",
    "Deferred",
    "Job",
    "Pending",
    "Traffic",
    "all_gather",
    "all_gather_parts",
    "all_reduce",
    "all_to_all_parts",
    "barrier",
    "broadcast",
    "gather_values",
    "hosts_of",
    "lane",
    "now_s",
    "part",
    "probe",
    "raise_together",
    "receive",
    "release",
    "send",
    "traffic",
]
