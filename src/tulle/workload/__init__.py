"""Plain values of the planner: what a training step does (`Profile`), and what it would run on (`Cluster`)."""

from tulle.workload.cluster import Cluster, Machine, network_from_json, network_to_json
from tulle.workload.profile import ModuleProfile, OptimizerProfile, Profile, Split, TableProfile, is_profile

__all__ = [
    "Cluster",
    "Machine",
    "ModuleProfile",
    "OptimizerProfile",
    "Profile",
    "Split",
    "TableProfile",
    "is_profile",
    "network_from_json",
    "network_to_json",
]
