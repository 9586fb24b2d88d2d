"""Stages send through memory to those of their host and through the network to others, within one pipeline."""

import os

import pytest
import torch.distributed as dist
from pipeline_networks import Branches, Chain, TiedEnds, Translator, compare, make, spread

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle.pipeline import through_nccl
from tulle.pipeline.mailbox import mailbox_of
from tulle.pipeline.through_gloo import ThroughGloo
from tulle.pipeline.through_memory import ThroughMemory
from tulle.pipeline.through_nccl import SWITCH as SWITCHES_NCCL
from tulle.shared_memory import SWITCH
from tulle.shared_memory.neighbours import Neighbours

TOLERANCE = 1e-14


@pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="ranks are told not to share memory")
@on_ranks(3)
def test_the_last_of_three_stages_is_on_another_host():
    can_share = Neighbours.can_share
    patches.setattr(Neighbours, "can_share", lambda self, ranks: 2 not in ranks and can_share(self, ranks))
    mesh = tulle.init(pipe=-1)
    kinds = {rank: type(channel) for rank, channel in mailbox_of(mesh["pipe"])._channels.items()}
    assert kinds == {
        rank: ThroughGloo if 2 in (rank, mesh.rank) else ThroughMemory for rank in range(3) if rank != mesh.rank
    }
    for kind in (Chain, Branches, Translator, TiedEnds):
        for schedule in ("1f1b", "zb-h1"):
            assignment = spread(make(kind), mesh.size)
            assert compare(kind, mesh, assignment, schedule=schedule, micro_batches=5) < TOLERANCE, kind.__name__


@pytest.mark.parametrize(("rank", "name", "value"), [(0, SWITCHES_NCCL, "0"), (2, "CUDA_DEVICE_MAX_CONNECTIONS", "1")])
@on_ranks(3)
def test_one_rank_can_keep_all_from_sending_by_nccl(rank, name, value):
    patches.setattr(through_nccl, "backend_of", lambda group, device_type: "nccl")  # which gloo cannot be taken for
    if dist.get_rank() == rank:
        patches.setenv(name, value)
    channels = mailbox_of(tulle.init(pipe=-1)["pipe"])._channels
    assert {type(channel) for channel in channels.values()} <= {ThroughMemory, ThroughGloo}
