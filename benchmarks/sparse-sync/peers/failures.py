"""What users reported of sparse gradients, tried on the peers: `python failures.py --library ddp --case empty-rank`.

One rank of it; the table after one step is compared with one process. Prints `right` or `wrong`; a crash
or a hang speaks for itself. The cases and their threads are:

    empty-rank      one rank looks nothing up (pytorch#87497)
    unused-table    no rank looks anything up in one of two tables (pytorch#80496)
    one-rank-uses   only one rank looks anything up in one of two tables (horovod: "will not work")
    zero-sum-row    the gradient of a row is [1, -1] (DeepSpeed PR#8504: the update was lost)
    float16         the table is in half precision (apex#243)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

CASES = ("empty-rank", "unused-table", "one-rank-uses", "zero-sum-row", "float16")
RATE = 0.5


class Two(nn.Module):
    """Two tables; the second may be left out of a step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Embedding.from_pretrained(torch.ones(8, 2, dtype=dtype), freeze=False, sparse=True)
        self.second = nn.Embedding.from_pretrained(torch.ones(8, 2, dtype=dtype), freeze=False, sparse=True)

    def forward(self, ids: Tensor, *, with_second: bool) -> Tensor:
        """The difference of the two columns: each row's gradient sums to zero."""
        signs = torch.tensor([1.0, -1.0], dtype=self.first.weight.dtype)
        loss = (self.first(ids) * signs).sum()
        return loss + (self.second(ids) * signs).sum() if with_second else loss


def batch(case: str, rank: int) -> tuple[Tensor, bool]:
    """A rank's ids, and whether it uses the second table."""
    ids = torch.tensor([1, 1, 2 + rank])
    if case == "empty-rank" and rank == 1:
        ids = ids[:0]
    return ids, not (case == "unused-table" or (case == "one-rank-uses" and rank == 1))


def expected(case: str, ranks: int) -> list[Tensor]:
    """Both tables after a step of one process on the mean of the ranks' losses (float32: no sparse halves on CPU)."""
    model = Two(torch.float32)
    for rank in range(ranks):
        ids, with_second = batch(case, rank)
        (model(ids, with_second=with_second) / ranks).backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    return [value.detach() for value in model.parameters()]


def ddp(model: Two) -> Callable[[Tensor, bool], None]:
    """DistributedDataParallel, told to look for parameters that were not used."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(ids: Tensor, with_second: bool) -> None:  # noqa: FBT001
        wrapped(ids, with_second=with_second).backward()
        optimizer.step()

    return step


def horovod(model: Two) -> Callable[[Tensor, bool], None]:
    """Horovod's optimizer, which all-gathers."""
    import horovod.torch as hvd
    from horovod_worker import join

    keep = join()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE), named_parameters=model.named_parameters()
    )

    def step(ids: Tensor, with_second: bool) -> None:  # noqa: FBT001
        model(ids, with_second=with_second).backward()
        optimizer.step()
        assert keep is not None

    return step


def deepspeed(model: Two) -> Callable[[Tensor, bool], None]:
    """DeepSpeed's engine."""
    import deepspeed as library

    library.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    config: dict[str, object] = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = library.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), RATE), config=config)

    def step(ids: Tensor, with_second: bool) -> None:  # noqa: FBT001
        engine.backward(engine(ids, with_second=with_second))
        engine.step()

    return step


def tulle(model: Two) -> Callable[[Tensor, bool], None]:
    """This library, beside them."""
    import tulle as library

    mesh = library.init(data=-1)
    distributed, optimizer = library.distribute(model, torch.optim.SGD(model.parameters(), RATE), mesh)

    def step(ids: Tensor, with_second: bool) -> None:  # noqa: FBT001
        distributed(ids, with_second=with_second).backward()
        optimizer.step()

    return step


LIBRARIES = {"ddp": ddp, "horovod": horovod, "deepspeed": deepspeed, "tulle": tulle}


def main() -> None:
    """One step, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dtype = torch.float16 if options.case == "float16" else torch.float32
    model = Two(dtype)
    LIBRARIES[options.library](model)(*batch(options.case, rank))
    wanted = expected(options.case, ranks)
    off = max((ours - theirs).abs().max().item() for ours, theirs in zip(model.parameters(), wanted, strict=True))
    print("right" if off < 1e-3 else f"wrong by {off:.3g}", flush=True)
    os._exit(0)  # the verdict is out; a library that cannot shut down after this has had its say


if __name__ == "__main__":
    main()
