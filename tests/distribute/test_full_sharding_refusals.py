"""What cannot be done with parameters that are shared out is refused by name."""

import copy
import io
import pickle

import pytest
import torch
from axes_models import build, distributed, worst_difference
from sharded_plans import FULL, planned
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import GradientError, ModelError, PlanError
from tulle.memory import named_shards
from tulle.plan import Memory, Plan


@on_ranks(2)
def test_a_part_is_not_written_in_as_if_it_were_the_whole():
    model, _, _ = distributed("stack", {"data": 2}, plan=planned("stack", {"data": 2}, FULL))
    weight = model.encoder.layers[0].linear1.weight
    shard = named_shards(model)["encoder.layers.0.linear1.weight"]
    wrong = {
        "normal_": nn.init.normal_,
        "bernoulli_": lambda weight: weight.data.bernoulli_(),
        "t_": lambda weight: weight.data.t_(),
        "__set__": lambda weight: setattr(weight, "data", torch.ones(shard.shape)),  # another dtype
        "nn.Parameter": lambda weight: nn.Parameter(weight.data * 2),
        "__setitem__": lambda weight: weight.__setitem__(0, 0),  # as torch does of what has a gradient
    }
    for taker, take in wrong.items():
        with pytest.raises(ModelError, match=rf"^{taker} was given 'encoder\.layers\.0\.linear1\.weight' as if all"):
            take(weight)
    (gradient,) = torch.autograd.grad((weight**2).sum(), [weight])
    assert torch.equal(gradient, 2 * weight.to_local())
    kept = io.BytesIO()
    torch.save(weight, kept)
    kept.seek(0)
    loaded = torch.load(kept)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, weight.to_local())


@on_ranks(2)
def test_what_was_made_of_wholes_is_not_averaged_with_parts_that_torch_would_repeat():
    mesh, model = tulle.init(data=-1), nn.Linear(2, 2, bias=False).double()
    average, fisher = copy.deepcopy(model).weight, torch.zeros(2, 2).double()
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
    model(torch.ones(3, 2).double()).sum().backward()
    part, gradient = model.weight.data, model.weight.grad
    assert part.to_local().shape == (1, 2), "a row, which torch repeats"
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match=r"^_foreach_lerp_ was given 'weight' as if .* made after tulle\.distribute$"),
    ):
        torch._foreach_lerp_([average], [part], 0.1)
    for taker, take in {"add_": lambda: fisher.add_(gradient), "mul": lambda: gradient.mul(fisher)}.items():
        with pytest.raises(
            GradientError, match=rf"^{taker} was given a gradient of which this rank has a part, \[1, 2"
        ):
            take()
    made_after = copy.deepcopy(model).weight
    with torch.no_grad():
        made_after.mul_(0.9).add_(model.weight.data, alpha=0.1)
    assert torch.allclose(made_after, model.weight.detach())


@on_ranks(2)
def test_what_cannot_be_shared_out_is_refused():
    mesh = tulle.init(data=-1)
    model = build("stack")
    with pytest.raises(PlanError, match="full_shard, but LBFGS looks at whole parameters"):
        tulle.distribute(model, torch.optim.LBFGS(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))


@on_ranks(2)
def test_gradients_that_are_to_have_gradients_are_refused():
    mesh = tulle.init(data=-1)
    model = nn.Linear(4, 4)
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
    with pytest.raises(ModelError, match=r"of Linear were asked for with create_graph=True, .* without full_shard"):
        model(torch.ones(1, 4)).pow(2).sum().backward(create_graph=True)


@on_ranks(2)
def test_parameters_that_others_take_the_place_of_are_named_before_anything_is_sent():
    mesh = tulle.init(data=-1)

    def take_away(model):
        model[1] = nn.Tanh()

    def replace_bias(model):
        model[1].bias = nn.Parameter(torch.zeros(4))

    for change, name in ((take_away, "1.weight"), (replace_bias, "1.bias")):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=Plan(mesh.shape, memory=FULL))
        model(torch.ones(1, 4)).sum().backward()
        change(model)
        with pytest.raises(
            ModelError, match=f"^'{name}' of Sequential was shared out by full_shard, and has been taken"
        ):
            model(torch.ones(1, 4))


@on_ranks(2)
@pytest.mark.parametrize(("shape", "memory"), [({"data": 2}, FULL), ({"model": 2}, Memory())], ids=str)
def test_a_pickle_says_what_to_take_instead(shape, memory):
    model, _, _ = distributed("stack", shape, plan=Plan(shape, memory=memory))
    for pickled in (model, model.encoder.layers[0], nn.Sequential(model)):
        for write in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(ModelError, match=r"^a \w+ was to be pickled, .* take tulle\.save, or torch\.save of"):
                write(pickled)
    copied = copy.deepcopy(model)
    assert type(copied.encoder.layers[0]) is type(model.encoder.layers[0])
    assert worst_difference(copied.state_dict(), model.state_dict()) == 0.0


STAGES = Plan({"pipe": 2}, stages={"0": 0, "1": 1})


@on_ranks(2)
@pytest.mark.parametrize(("shape", "plan"), [({"pipe": 2}, STAGES), ({"model": 2}, "auto")], ids=["pipe", "model"])
def test_a_model_of_which_a_rank_has_a_stage_or_split_layers_is_not_pickled(shape, plan):
    model = nn.Sequential(nn.Embedding(40, 4), nn.Linear(4, 4))
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), tulle.init(**shape), plan=plan)
    with pytest.raises(
        ModelError, match=r"^a Sequential was to be pickled, .* may have parts only .* take tulle\.save"
    ):
        pickle.dumps(model)
    assert type(copy.deepcopy(model)) is nn.Sequential


@on_ranks(2)
def test_a_softmax_whose_table_is_shared_out_says_that_it_has_a_part():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax = tulle.ShardedSoftmax(8, 4, bias=True)

        def forward(self, x, target):
            return self.softmax(x, target)

    model, mesh = Words(), tulle.init(data=-1)
    plan = Plan(mesh.shape, memory=Memory(full_shard=True))
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=plan)
    x, target = torch.ones(3, 4), torch.tensor([0, 4, 7])
    model(x, target).backward()
    softmax = model.softmax
    for asked in (lambda: softmax.top_k(x, 2), lambda: softmax.log_prob(x), lambda: softmax.predict(x)):
        with pytest.raises(ModelError, match=r"top_k was given 'softmax\.weight' as if all of it were here.*by rows"):
            asked()
    with pytest.raises(ModelError, match=r"exact_loss was given 'softmax\.weight' as if"):
        softmax.exact_loss(x, target)
