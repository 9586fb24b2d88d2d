"""Plain DDP with `tulle.sync.ddp_hook` gives the mean of the ranks' gradients, step after step."""

import copy
import pickle
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tulle
from gigabit import give_network
from ranks import on_ranks
from tulle.comm import background as background_module
from tulle.comm import gather_values
from tulle.errors import MeshError, PlanError
from tulle.sync import DDPState, Packet
from tulle.sync.ddp_hook import _state_of
from tulle.sync.persistent import PersistentAllReduce

ROWS = 200


class Reader(nn.Module):
    """Two tables of one shape, of which one is read much more than the other, one of another width, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.tags = (nn.Embedding(ROWS, 4, sparse=True).double() for _ in range(2))
        self.bags = nn.EmbeddingBag(ROWS, 3, sparse=True).double()
        self.out = nn.Linear(7, 1).double()

    def forward(self, ids: Tensor) -> Tensor:
        both = self.words(ids) + self.tags(ids[:1])
        return self.out(torch.cat([both, self.bags(ids.view(-1, 1))], dim=1)).square().sum()


def ids_of(rank: int, step: int) -> Tensor:
    """A few of all; in step 3 many on the last rank, in step 4 those of one row on all."""
    counts = {3: 20 * (rank + 1) ** 2, 4: 1}
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, ROWS, (counts.get(step, 5 + rank),), generator=generator)


def expected(ranks: int, step: int) -> list[Tensor]:
    """The mean over the ranks of each parameter's gradient, by one process."""
    model = Reader()
    for rank in range(ranks):
        (model(ids_of(rank, step)) / ranks).backward()
    return [parameter.grad.to_dense() for parameter in model.parameters()]


def check_gradients(model: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), gradient, rtol=1e-12, atol=1e-14)


@on_ranks(1)
def test_alone_a_process_takes_its_gradients_as_they_are_and_starts_no_thread():
    tulle.init(data=-1)
    before = threading.active_count()
    model = DistributedDataParallel(Reader())
    model.register_comm_hook(state := DDPState(), tulle.sync.ddp_hook)
    model(ids_of(0, step=1)).backward()
    for found, wanted in zip(model.parameters(), expected(1, step=1), strict=True):
        torch.testing.assert_close(found.grad.to_dense(), wanted, rtol=1e-14, atol=0)
    assert threading.active_count() == before
    assert not state._reductions


@on_ranks(2, 3)
def test_gradients_are_those_of_one_process_with_and_without_packets(monkeypatch):
    axis = tulle.init(data=-1)["data"]
    sent: list[bool] = []
    exchange = Packet.exchange

    def watched(packet, words, gradients, axis):
        sent.append(packet.holds(words))
        return exchange(packet, words, gradients, axis)

    monkeypatch.setattr(Packet, "exchange", watched)
    for state, is_in_packets in ((DDPState(give_network(axis)), True), (DDPState(axis, scheme="balanced"), False)):
        sent.clear()
        model = DistributedDataParallel(Reader())
        model.register_comm_hook(state, tulle.sync.ddp_hook)
        for step in range(7):
            model.zero_grad()
            model(ids_of(axis.rank, step)).backward()
            check_gradients(model, expected(axis.size, step))
        heard = gather_values(sent, axis, label="here")
        if is_in_packets:
            assert [len(of_rank) for of_rank in heard] == [6] * axis.size, "three tables in one, from step 1 on"
            assert not all(heard[-1]), "in step 3 the last rank has more rows than there is room for"
            assert any(heard[-1])
        else:
            assert heard == [[]] * axis.size


@on_ranks(2)
def test_a_scheme_that_does_not_exist_is_told_when_the_state_is_made():
    tulle.init(data=-1)
    with pytest.raises(PlanError, match="unknown scheme 'fastest'"):
        DDPState(scheme="fastest")


@on_ranks(1)
def test_what_is_no_axis_is_told_when_the_state_is_made():
    mesh = tulle.init(data=-1)
    for given, kind in (("data", "str"), (mesh, "Mesh")):
        with pytest.raises(MeshError, match=f"DDPState was given a {kind} as axis, expected one of a mesh, as mesh"):
            DDPState(given)


@on_ranks(2)
def test_what_is_no_state_is_told():
    tulle.init(data=-1)
    for state in ("balanced", {"scheme": "balanced"}):
        model = DistributedDataParallel(Reader())
        model.register_comm_hook(state, tulle.sync.ddp_hook)
        with pytest.raises(Exception, match=r"was given the state .*balanced.*, expected None, the axis or"):
            model(torch.arange(3)).backward()


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["any graph", "static graph"])
def test_an_error_reaches_the_user_as_itself_and_ddp_goes_on(options):
    axis = tulle.init(data=-1)["data"]
    model, state = DistributedDataParallel(Reader(), **options), DDPState(axis, ("balanced", "allgather")[axis.rank])
    model.register_comm_hook(state, tulle.sync.ddp_hook)
    for _ in range(2):
        with pytest.raises(PlanError, match="scheme 'allgather', op 'mean' on rank 1 of axis 'data' and scheme"):
            model(ids_of(axis.rank, 0)).backward()
        model.zero_grad()
    state.scheme = "balanced"
    state._reductions.clear()
    model(ids_of(axis.rank, 0)).backward()
    check_gradients(model, expected(axis.size, 0))


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["any graph", "static graph"])
@pytest.mark.parametrize("scheme", ["auto", "balanced"])
def test_where_the_thread_takes_turns_as_on_a_gpu_all_is_done_when_ddp_begins_to_wait(scheme, options):
    axis = tulle.init(data=-1)["data"]
    state = DDPState(give_network(axis), scheme)
    state._thread._turns = background_module._Turns()
    model = DistributedDataParallel(Reader(), **options)
    model.register_comm_hook(state, tulle.sync.ddp_hook)
    for step in range(3):
        model.zero_grad()
        model(ids_of(axis.rank, step)).backward()
        check_gradients(model, expected(axis.size, step))


@on_ranks(2, 3)
@pytest.mark.parametrize("scheme", ["auto", "balanced"])
def test_ranks_that_have_no_more_batches_add_nothing_to_the_gradients_of_others(scheme):
    axis = tulle.init(data=-1)["data"]
    model = DistributedDataParallel(Reader())
    model.register_comm_hook(DDPState(give_network(axis), scheme), tulle.sync.ddp_hook)
    with model.join():
        for step in range(1, 3 + axis.rank):
            model.zero_grad()
            model(ids_of(axis.rank, step)).backward()
            left = Reader()
            for rank in range(max(0, step - 2), axis.size):
                (left(ids_of(rank, step)) / axis.size).backward()
            check_gradients(model, [parameter.grad.to_dense() for parameter in left.parameters()])


@on_ranks(2)
def test_a_rank_that_has_no_more_batches_raises_what_others_raise():
    axis = tulle.init(data=-1)["data"]
    model, state = DistributedDataParallel(Reader()), DDPState(axis, "balanced")
    model.register_comm_hook(state, tulle.sync.ddp_hook)

    def train() -> None:
        with model.join():
            for step in range(2 + axis.rank):
                state.scheme = "allgather" if step == 2 else "balanced"
                state._reductions.clear()
                model(ids_of(axis.rank, step)).backward()

    with pytest.raises(PlanError, match="scheme 'allgather', op 'mean' on rank 1 of axis 'data' and scheme"):
        train()


@on_ranks(2)
def test_a_ddp_model_with_a_state_is_pickled_and_copied():
    axis = tulle.init(data=-1)["data"]
    model = DistributedDataParallel(Reader())
    model.register_comm_hook(DDPState(axis, "balanced", "bf16"), tulle.sync.ddp_hook)
    model(ids_of(axis.rank, 0)).backward()
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(again.state_dict(), model.state_dict())
    state = pickle.loads(pickle.dumps(DDPState(axis, "balanced", "bf16")))
    assert (state.scheme, state.wire_dtype, state._axis.size) == ("balanced", "bf16", 2)
    assert copy.deepcopy(DDPState(axis)).axis is axis


@on_ranks(2)
def test_a_state_of_some_processes_is_not_pickled():
    axis = tulle.init(data=1, model=2)["data"]
    with pytest.raises(MeshError, match=r"of 1 of 2 processes cannot be pickled.*pickle the model within it"):
        pickle.dumps(DDPState(axis))


@on_ranks(2)
def test_states_of_two_models_on_one_axis_share_a_thread_so_that_their_exchanges_keep_one_order(monkeypatch):
    axis = tulle.init(data=-1)["data"]
    threads: set[int] = set()
    mean = PersistentAllReduce.mean

    def watched(reduction, gradient):
        threads.add(threading.get_ident())
        return mean(reduction, gradient)

    monkeypatch.setattr(PersistentAllReduce, "mean", watched)
    fast = give_network(axis)
    for states in ([DDPState(axis), DDPState(axis)], [DDPState(fast), DDPState(fast)], [DDPState(fast)] * 2):
        pair = [DistributedDataParallel(Reader()) for _ in states]
        for model, state in zip(pair, states, strict=True):
            model.register_comm_hook(state, tulle.sync.ddp_hook)
        for step in range(3):
            for model in pair:
                model.zero_grad()
            sum(model(ids_of(axis.rank, step)) for model in pair).backward()
            for model in pair:
                check_gradients(model, expected(axis.size, step))
    assert len(threads) == 1


@on_ranks(2)
def test_models_on_other_processes_have_another_state():
    """The twins of `DDPState`: what is registered with a process group alone."""
    axis = tulle.init(data=-1)["data"]
    alone = [dist.new_group([rank]) for rank in axis.ranks][axis.rank]
    assert _state_of(alone) is _state_of(alone)
    assert _state_of(alone)._axis.size == 1
    assert _state_of(None) is _state_of(dist.group.WORLD)
    assert _state_of(None)._axis.size == 2


def test_a_process_group_that_was_destroyed_leaves_no_thread_behind():
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        gradient = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (10, 4))
        _state_of(None).start(torch.zeros(10, 4), gradient).wait()
        dist.destroy_process_group()
    deadline_s = time.monotonic() + 30
    while (left := [thread.name for thread in threading.enumerate()].count("tulle ddp_hook")) > 1:
        assert time.monotonic() < deadline_s, f"{left} threads are left"
        time.sleep(0.01)
