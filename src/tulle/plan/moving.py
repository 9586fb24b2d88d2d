"""`on_machine`: a profile as it would be on other machines."""

from __future__ import annotations

from dataclasses import replace

from tulle.plan.update import alone_update_s
from tulle.workload import Machine, Profile


def on_machine(profile: Profile, machine: Machine) -> Profile:
    """The profile as it would be on other machines: computation goes by their flops, updates by their memory."""
    was = profile.cluster.machine
    if was == machine:
        return profile
    pace, memory_pace = was.flop_per_s / machine.flop_per_s, was.memory_bytes_per_s / machine.memory_bytes_per_s
    modules = tuple(
        replace(
            piece,
            forward_s=piece.forward_s * pace,
            backward_s=piece.backward_s * pace,
            weights_s=piece.weights_s * pace,
        )
        for piece in profile.modules
    )
    row_s = profile.optimizer.row_s_per_byte
    optimizer = replace(
        profile.optimizer,
        step_s_per_byte=profile.optimizer.step_s_per_byte * memory_pace,
        row_s_per_byte=None if row_s is None else row_s * memory_pace,
    )
    update_s = min(profile.step_s, alone_update_s(profile))
    step_s = (profile.step_s - update_s) * pace + update_s * memory_pace
    cluster = replace(profile.cluster, machine=machine)
    return replace(profile, modules=modules, optimizer=optimizer, cluster=cluster, step_s=step_s)
