"""Typed collectives that count bytes and messages, some with gradients; the network probe; the background thread."""

from tulle.comm.agree import gather_values, raise_together
from tulle.comm.background import BackgroundThread, Job, beside, pause, used_here
from tulle.comm.collectives import all_gather, all_reduce, barrier, broadcast
from tulle.comm.differentiable import enter, exchange, gather, halo, leave, reduce_scatter, scatter
from tulle.comm.eager import eager, untraced
from tulle.comm.lane import alone, hosts_of, lane, on_host, ranks_by_host
from tulle.comm.levels import can_have_levels, has_levels
from tulle.comm.monitored_barrier import follow_steps, monitored_barrier
from tulle.comm.number_of_all import meet_to_read, number_of_all
from tulle.comm.parts import all_gather_parts, all_to_all_parts, receive, send
from tulle.comm.pending import Deferred, Pending
from tulle.comm.probe import probe
from tulle.comm.scratch import release
from tulle.comm.through_memory import zeros
from tulle.comm.traffic import Count, Traffic, now_s, traffic
from tulle.comm.weighed import Weights, weighed

__all__ = [
    "BackgroundThread",
    "Count",
    "Deferred",
    "Job",
    "Pending",
    "Traffic",
    "Weights",
    "all_gather",
    "all_gather_parts",
    "all_reduce",
    "all_to_all_parts",
    "alone",
    "barrier",
    "beside",
    "broadcast",
    "can_have_levels",
    "eager",
    "enter",
    "exchange",
    "follow_steps",
    "gather",
    "gather_values",
    "halo",
    "has_levels",
    "hosts_of",
    "lane",
    "leave",
    "meet_to_read",
    "monitored_barrier",
    "now_s",
    "number_of_all",
    "on_host",
    "pause",
    "probe",
    "raise_together",
    "ranks_by_host",
    "receive",
    "reduce_scatter",
    "release",
    "scatter",
    "send",
    "traffic",
    "untraced",
    "used_here",
    "weighed",
    "zeros",
]
