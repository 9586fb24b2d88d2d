"""Sharded optimizer state: every element-wise optimizer of torch steps as in one process."""

import copy
import time

import pytest
import torch
from odd_network import OPTIMIZERS, STEPS, difference, make, train
from torch import nn

import tulle
from ranks import on_ranks
from tulle import board
from tulle.errors import CommunicationError, ModelError
from tulle.memory import compute_in, shard_optimizer
from tulle.memory.pieces import lay_out
from tulle.plan import Memory


class Sized:
    """A parameter of one number that counts how often it is asked for its size."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self):
        self.asked = 0

    def numel(self):
        return 1

    @property
    def nbytes(self):
        self.asked += 1
        return 4


def test_the_time_to_lay_out_grows_with_the_number_of_parameters_and_not_with_its_square():
    parameters = [Sized() for _ in range(20)]
    assert list(lay_out(parameters)) == [parameters]
    assert {parameter.asked for parameter in parameters} == {1}


@on_ranks(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_steps_as_in_one_process(name):
    mesh = tulle.init(data=-1)
    reference, expected = make(name)
    train(reference, expected)
    model, optimizer = tulle.distribute(*make(name), mesh)
    shard_optimizer(optimizer, mesh["data"])
    train(model, optimizer, mesh["data"])
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12
    assert difference(optimizer.state_dict(), expected.state_dict()) < 1e-12


@on_ranks(3)
def test_a_group_that_is_added_later_is_sharded_too():
    """As when what was frozen is trained from some step on, and when a run goes on that had done so."""
    mesh = tulle.init(data=-1)

    def add(model, optimizer):
        optimizer.add_param_group({"params": [*model.sometimes.parameters()], "lr": 0.02})

    def small():
        model, _ = make("AdamW")
        return model, torch.optim.AdamW([*model.convolution.parameters(), model.scale, *model.out.parameters()], 0.01)

    reference, expected = small()
    model, optimizer = tulle.distribute(*small(), mesh)
    shard_optimizer(optimizer, mesh["data"])
    for one, its, axis in ((reference, expected, None), (model, optimizer, mesh["data"])):
        train(one, its, axis, [0, 2])
        add(one, its)
        its.state_dict()  # before its first step
        train(one, its, axis, [1])
    assert difference(optimizer.state_dict(), expected.state_dict()) < 1e-12
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, its = tulle.distribute(*small(), mesh)
    shard_optimizer(its, mesh["data"])
    add(resumed, its)
    resumed.load_state_dict(state[0])
    its.load_state_dict(state[1])
    for one, optimizer, axis in ((reference, expected, None), (resumed, its, mesh["data"])):
        train(one, optimizer, axis, [2, 3])
    assert difference(dict(resumed.state_dict()), dict(reference.state_dict())) < 1e-12
    assert difference(its.state_dict(), expected.state_dict()) < 1e-12


@on_ranks(3)
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_what_is_frozen_has_no_master_and_does_not_travel_until_it_is_trained(narrow):
    """As the base of adapters in an optimizer over all parameters."""
    mesh = tulle.init(data=-1)

    def frozen():
        model, optimizer = make("AdamW")
        model.convolution.requires_grad_(False)
        return model, optimizer

    reference, expected = frozen()
    model, optimizer = frozen()
    shards = shard_optimizer(optimizer, mesh["data"], narrow=narrow)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for one, its in ((reference, expected), (model, optimizer)):
        one.convolution.requires_grad_(False)
        train(one, its, None, [0, 2])
    assert sum(sum(bucket.lengths) for bucket in shards.buckets) == trained
    for one, its in ((reference, expected), (model, optimizer)):
        one.convolution.requires_grad_(True)
        train(one, its, None, [1, 2])
    found = optimizer.state_dict()
    if narrow is None:
        assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12
        assert difference(found, expected.state_dict()) < 1e-12
    else:
        assert all(state["master"].dtype == torch.float64 for state in found["state"].values())
    resumed, its = frozen()
    shard_optimizer(its, mesh["data"], narrow=narrow)
    resumed.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(found))  # what it remembers of what is frozen is not lost
    assert difference(its.state_dict(), found) == 0


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_step_sends_without_the_compiler():
    mesh = tulle.init(data=-1)
    reference = nn.Linear(3, 3)
    model = copy.deepcopy(reference)
    _, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    shard_optimizer(optimizer, mesh["data"])
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for one, take in ((model, step), (reference, torch.optim.SGD(reference.parameters(), lr=0.1).step)):
        one(torch.ones(2, 3)).sum().backward()
        take()
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-6


@on_ranks(1, 2, 4)
def test_the_number_of_ranks_does_not_matter():
    test_every_elementwise_optimizer_steps_as_in_one_process.body_on_ranks("AdamW")


@on_ranks(2)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_parameter_without_elements_has_the_state_that_it_has_in_one_process(
    optimizer_class: type[torch.optim.Optimizer],
):
    axis = tulle.init(data=-1)["data"]
    model = nn.Linear(3, 1)
    model.empty = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))  # the only one of its dtype
    model.none = nn.Parameter(torch.empty(2, 0))
    reference = copy.deepcopy(model)
    optimizers = [optimizer_class(one.parameters(), lr=0.1) for one in (model, reference)]
    shard_optimizer(optimizers[0], axis)
    for one, optimizer in zip((model, reference), optimizers, strict=True):
        for _ in range(2):
            (one(torch.ones(2, 3)).sum() + one.empty.sum() + one.none.sum()).backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(model.weight, reference.weight)
    assert model.empty.grad.shape == (0, 4)
    whole, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("narrow", [None, torch.bfloat16], ids=str)
def test_a_parameter_of_whole_numbers_is_stepped_by_nobody(narrow):
    """As weights that were quantized are, which lie among those of an optimizer."""
    axis = tulle.init(data=-1)["data"]
    model = nn.Linear(3, 1)
    model.codes = nn.Parameter(torch.arange(300), requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    shard_optimizer(optimizer, axis, narrow=narrow)
    model(torch.ones(2, 3, dtype=narrow)).sum().backward()
    optimizer.step()
    assert torch.equal(model.codes, torch.arange(300))
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(model.codes, torch.arange(300))


@on_ranks(2, 4)
def test_each_rank_holds_its_share_of_the_state():
    axis = tulle.init(data=-1)["data"]
    model, optimizer = tulle.distribute(*make("Adam"), tulle.init(data=-1))
    shard_optimizer(optimizer, axis)
    train(model, optimizer, axis)
    held = sum(
        v.numel() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()
    )
    assert held <= 3 * (sum(p.numel() for p in model.parameters()) / axis.size + 1)


@on_ranks(2, 3)
def test_a_run_goes_on_from_a_state_of_any_number_of_ranks():
    mesh = tulle.init(data=-1)
    reference, expected = make("Adam")
    train(reference, expected, steps=range(2))
    saved = copy.deepcopy((reference.state_dict(), expected.state_dict()))
    train(reference, expected, steps=range(2, 4))
    model, optimizer = tulle.distribute(*make("Adam"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    train(model, optimizer, mesh["data"], steps=[7])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, mesh["data"], steps=range(2, 4))
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12
    assert difference(optimizer.state_dict(), expected.state_dict()) < 1e-12


@on_ranks(2)
def test_an_optimizer_that_has_stepped_is_sharded_as_it_stands():
    mesh = tulle.init(data=-1)
    reference, expected = make("AdamW")
    train(reference, expected)
    model, optimizer = tulle.distribute(*make("AdamW"), mesh)
    train(model, optimizer, mesh["data"], steps=range(2))
    shard_optimizer(optimizer, mesh["data"])
    train(model, optimizer, mesh["data"], steps=range(2, STEPS))
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12


@on_ranks(2)
def test_the_comparison_can_fail_where_stepped_parts_do_not_travel():
    mesh = tulle.init(data=-1)
    reference, expected = make("Adam")
    train(reference, expected)
    model, optimizer = tulle.distribute(*make("Adam"), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tulle.memory.OptimizerShards, "_share", lambda *_, **__: [])
        shard_optimizer(optimizer, mesh["data"])
        with pytest.raises(
            ModelError, match="was not the same on all ranks of axis 'data' at the step after backward 2"
        ):
            train(model, optimizer, mesh["data"])
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) > 1e-4


@on_ranks(1, 2, 3)
def test_masters_of_narrow_parameters_keep_what_a_narrow_step_would_lose():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begin = model.weight.detach().clone()
    model, optimizer = tulle.distribute(model, optimizer, mesh)
    shard_optimizer(optimizer, mesh["data"], narrow=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    for _ in range(64):  # each step is lost in bfloat16
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -(2.0**-12))
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["master"], begin + 64 * 2.0**-12)
    assert torch.equal(model.weight, (begin + 64 * 2.0**-12).bfloat16())
    expected = copy.deepcopy(state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert difference(optimizer.state_dict()["state"], expected) == 0.0


def narrow_losses(model, optimizer, axis, steps=30):
    losses = []
    for step in range(steps):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x.chunk(axis.size)[axis.rank]) - x.chunk(axis.size)[axis.rank].flip(1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(tulle.comm.gather_values(loss.item(), axis, label="test")) / axis.size)
    return losses


@on_ranks(1, 2, 3)
def test_narrow_parameters_train_as_wide_ones_nearly_do():
    mesh = tulle.init(data=-1)
    found = {}
    for narrow in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        model, optimizer = tulle.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), mesh)
        if narrow is not None:
            compute_in(model, narrow)
            shard_optimizer(optimizer, mesh["data"], narrow=narrow)
        found[narrow] = narrow_losses(model, optimizer, mesh["data"])
    assert found[None][-1] < 0.7 * found[None][0]
    assert found[torch.bfloat16] == pytest.approx(found[None], rel=0.02)
    assert found[torch.bfloat16] != found[None]


@on_ranks(1)
def test_what_cannot_be_sharded_is_refused():
    axis = tulle.init(data=-1)["data"]
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="state of a LBFGS is not known to be element-wise"):
        shard_optimizer(torch.optim.LBFGS(model.parameters()), axis)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_optimizer(optimizer, axis, narrow=torch.bfloat16)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ModelError, match=r"of shape \[2\] was added to an optimizer after"):
        optimizer.step()
    with pytest.raises(ModelError, match=r"shape \[2, 2\] and strides \[4, 2\] has gaps"):
        shard_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2, 4)[:, ::2])], lr=0.1), axis)


@on_ranks(2)
def test_masters_follow_what_is_written_to_their_parameters():
    mesh = tulle.init(data=-1)
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begin = model.weight.detach().clone()
    shard_optimizer(optimizer, mesh["data"], narrow=torch.bfloat16)
    model.weight.data[0] = 2.0  # past torch's counter, as moving averages are put in place
    model.weight.grad = torch.full_like(model.weight, -(2.0**-12))
    optimizer.step()
    master = optimizer.state_dict()["state"][0]["master"]
    assert torch.equal(master, torch.stack([torch.full((3,), 2.0), begin[1]]) + 2.0**-12)
    model.load_state_dict({"weight": torch.ones(2, 3)})
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], torch.ones(2, 3))


@on_ranks(2)
def test_a_state_that_one_rank_asks_for_alone_is_refused_as_soon_as_another_steps():
    mesh = tulle.init(data=-1)
    model = nn.Linear(4, 4)
    model, optimizer = tulle.distribute(
        model,
        torch.optim.Adam(model.parameters()),
        mesh,
        plan=tulle.Plan(mesh.shape, memory=Memory(shard_optimizer=True)),
    )
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 1:  # that others come later is no fault
            time.sleep(0.5 * mesh.rank)
            assert len(optimizer.state_dict()["state"]) == 2
    text = (
        r"optimizer.state_dict\(\) was called on rank 0 of axis 'data', but rank 1 has begun another step: .* `if rank"
    )
    begin_s = time.monotonic()
    if mesh.rank == 0:
        with pytest.raises(CommunicationError, match=text):
            optimizer.state_dict()
        assert time.monotonic() - begin_s < 5, "it waited for the time-out"
    model(torch.ones(2, 4)).sum().backward()  # nothing was begun, so that it can go on
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 2
    if mesh.rank == 1:
        board.leave_in_peace()
    else:
        with pytest.raises(CommunicationError, match="but rank 1 has left: of an optimizer"):
            optimizer.state_dict()
