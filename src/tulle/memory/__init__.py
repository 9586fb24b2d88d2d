"""What saves memory: sharded optimizer states, recomputed and offloaded activations, and an estimate of it all."""

from tulle.live import LiveBytes, measure_peak_bytes
from tulle.memory.estimate import Estimate, estimate
from tulle.memory.full_shard import shard_fully, whole_state_dict
from tulle.memory.lines import Line, lines
from tulle.memory.narrow import compute_in
from tulle.memory.offload import Offloading, offload
from tulle.memory.options import Memory
from tulle.memory.recompute import (
    Activation,
    choose_recomputed,
    profile_activations,
    recompute,
    recompute_by_cost,
    repeated,
)
from tulle.memory.shard import Shard, shard_of
from tulle.memory.shards import OptimizerShards, shard_optimizer
from tulle.memory.shared_out import share_out
from tulle.memory.whole_states import named_shards, state_of_shards
from tulle.traits import register_elementwise

__all__ = [
    "Activation",
    "Estimate",
    "Line",
    "LiveBytes",
    "Memory",
    "Offloading",
    "OptimizerShards",
    "Shard",
    "choose_recomputed",
    "compute_in",
    "estimate",
    "lines",
    "measure_peak_bytes",
    "named_shards",
    "offload",
    "profile_activations",
    "recompute",
    "recompute_by_cost",
    "register_elementwise",
    "repeated",
    "shard_fully",
    "shard_of",
    "shard_optimizer",
    "share_out",
    "state_of_shards",
    "whole_state_dict",
]
