"""Models, optimizers and tables that cannot be distributed raise the same clear error on every rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import models
import tulle
from models import Words, build
from raised_alike import every_rank_raises, last, sgd
from ranks import on_ranks
from tulle.errors import ModelError


def distribute(model: object, optimizer: object) -> None:
    tulle.distribute(model, optimizer, tulle.init(data=-1))


@on_ranks(1, 2)
def test_a_model_that_is_none():
    with every_rank_raises(ModelError, "given a function as model, expected a torch.nn.Module", found_by=0):
        distribute(lambda x: x, sgd(nn.Linear(1, 1)))


@on_ranks(1, 2)
def test_an_optimizer_that_is_none():
    model = build(Words, 0)
    scheduler = LambdaLR(sgd(model), lambda step: 1.0)
    expected = "as optimizer, expected a torch.optim.Optimizer or a list of them"
    with every_rank_raises(ModelError, f"given a LambdaLR {expected}", found_by=0):
        distribute(model, scheduler)
    for given, nothing in (("a NoneType", None), ("an empty list", [])):
        by_hand = "for parameters that the loop writes itself, give a torch.optim.SGD over them that never steps"
        with every_rank_raises(ModelError, f"given {given} {expected}: {by_hand}", found_by=0):
            distribute(model, nothing)
    by_name = "give the optimizer second and the mesh after it, or by name (mesh=mesh)"
    with every_rank_raises(ModelError, f"given a Mesh {expected}: {by_name}", found_by=0):
        distribute(model, tulle.init(data=-1))
    with every_rank_raises(ModelError, "given a LambdaLR among the optimizers, expected torch.optim's", found_by=0):
        distribute(model, [sgd(model), scheduler])
    wrapper = torch.optim.Optimizer.__new__(type("Lookahead", (torch.optim.Optimizer,), {}))
    wrapper.param_groups = sgd(model).param_groups
    for _ in range(2):
        with every_rank_raises(ModelError, "Lookahead is an Optimizer whose __init__ did not call super()", found_by=0):
            distribute(model, wrapper)
        wrapper._optimizer_step_pre_hooks = wrapper._optimizer_step_post_hooks = {}  # as timm's makes these alone


@on_ranks(1, 2)
def test_an_optimizer_of_another_model():
    model = build(Words, 0)
    text = (
        "parameter 0 of group 0 of SGD, of shape [40, 6], is not a parameter of this Words: "
        "make it from model.parameters() after the model is complete"
    )
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(build(Words, 0)))
    log_alpha = torch.zeros(1, requires_grad=True)  # as implementations of soft actor-critic have it
    text = (
        "distribute torch.nn.ModuleList of them, a tensor of your own as an nn.Parameter, in a torch.nn.ParameterList"
    )
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, [sgd(model), SGD([log_alpha], lr=0.1)])


@on_ranks(3)
def test_an_optimizer_of_another_model_on_one_rank_only():
    model = build(Words, 0)
    others = SGD([{"params": [model.out.bias]}, {"params": [model.out.weight, nn.Parameter(torch.ones(3))]}], lr=0.1)
    with every_rank_raises(ModelError, "parameter 1 of group 1 of SGD, of shape [3], is not", found_by=last()):
        distribute(model, others if dist.get_rank() == last() else sgd(model))


def widened(model: Words) -> None:
    model.hidden = nn.Linear(models.WIDTH, 9).double()


def halved(model: Words) -> None:
    model.hidden.weight = nn.Parameter(model.hidden.weight.half())


def frozen(model: Words) -> None:
    model.hidden.weight.requires_grad_(requires_grad=False)


def lengthened(model: Words) -> None:
    model.register_buffer("more", torch.zeros(2))


@on_ranks(3)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (widened, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float64 [9, 6]"),
        (halved, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float16 [6, 6]"),
        (frozen, "parameter hidden.weight float64 [6, 6] against parameter hidden.weight float64 [6, 6] frozen"),
        (lengthened, "buffer more float32 [2] is only on one of them"),
    ],
)
def test_ranks_whose_models_differ_are_told_where(change, text):
    model = build(Words, 0)
    if dist.get_rank() == last():
        change(model)
    whole = f"the models of rank 0 and rank {last()} of axis 'data' differ: {text}: build the same model on every rank"
    with every_rank_raises(ModelError, whole):
        distribute(model, sgd(model))


@on_ranks(2)
def test_ranks_whose_lookups_or_optimizers_differ_are_told_where():
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(9, 2, sparse=rank == 1))
    text = "differ: lookup 0 Embedding(9, 2) against lookup 0 Embedding(9, 2, sparse=True): build the same"
    with every_rank_raises(ModelError, text):
        distribute(model, sgd(model))
    model = nn.Sequential(nn.EmbeddingBag(9, 2, sparse=rank == 1))
    with every_rank_raises(ModelError, "EmbeddingBag(9, 2, mode='mean', sparse=True): build the same"):
        distribute(model, sgd(model))
    model = nn.Sequential(nn.Embedding(9, 2))
    with every_rank_raises(ModelError, "differ: optimizer SGD lr=0.1 "):
        distribute(model, SGD(model.parameters(), lr=0.1 + rank))
    model = nn.Linear(2, 2)
    with every_rank_raises(ModelError, "optimizer SGD which steps 'weight' is only on one of them: build the same"):
        distribute(model, SGD([model.bias, model.weight][: 2 - rank], lr=0.1))
    text = "optimizer SGD which steps 'weight' against optimizer SGD which steps 'bias': build"
    with every_rank_raises(ModelError, text):
        distribute(model, SGD([model.bias if rank else model.weight], lr=0.1))


@on_ranks(2)
def test_options_of_a_group_may_stand_in_any_order():
    options = [("lr", 0.1), ("weight_decay", 0.0), ("layer", 1), ("depth", 2)]  # as of a set, S4's own way
    model = nn.Linear(2, 2)
    distribute(model, SGD([{"params": model.parameters(), **dict(options[:: (1, -1)[dist.get_rank()]])}]))


@on_ranks(2)
def test_memory_that_optimizers_keep_in_their_groups_may_hold_anything():
    # Muon has update_buffer=torch.empty(...) there, of which its ranks send each other updates.
    for is_alike in (True, False):
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=torch.tensor(0.1))
        rows = 2 if is_alike else 2 + dist.get_rank()
        optimizer.param_groups[0]["update_buffer"] = [torch.full((rows, 2), float(dist.get_rank()))]
        if is_alike:
            distribute(model, optimizer)
        else:
            with every_rank_raises(ModelError, "update_buffer=['torch.float32 [2, 2]'] against"):
                distribute(model, optimizer)


@on_ranks(1, 2)
def test_a_model_on_the_meta_device_that_nothing_fills():
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.empty(2, device="meta")))
    text = "'scale' is on device meta, and Module has no reset_parameters that fills it: build the model within tulle."
    with pytest.raises(ModelError, match=text):
        distribute(model, sgd(model))


def test_a_model_that_is_not_on_the_device_of_the_mesh():
    mesh = dataclasses.replace(tulle.init(data=-1), device=torch.device("cuda:0"))
    layer, norm = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1, device="meta"), nn.BatchNorm1d(1, affine=False))
    for model, what in ((layer, "parameter 'weight'"), (norm, "buffer '1.running_mean'")):
        text = rf"{what} is on cpu, the mesh on cuda:0: call model.to\(mesh.device\)"
        with pytest.raises(ModelError, match=text):
            tulle.distribute(model, sgd(model), mesh)


@on_ranks(1, 2)
def test_a_model_with_a_lazy_layer():
    model = nn.Sequential(nn.LazyLinear(3))
    text = "parameter '0.weight' has no shape yet (a lazy module): call the model once before"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@on_ranks(2)
@pytest.mark.parametrize("how", ["full_shard", "rows", "model", "replicas"])
def test_a_buffer_in_the_memory_of_a_parameter_that_is_cut(how):
    mesh, model = tulle.init(**{"model" if how == "model" else "data": -1}), build(Words, 0)
    model.register_buffer("shown", model.words.weight.data[1:])
    memory = tulle.Memory(full_shard=how == "full_shard")
    plan = {"words": "rows"} if how == "rows" else tulle.Plan(mesh.shape, memory=memory)
    if how == "replicas":
        tulle.distribute(model, sgd(model), mesh, plan=plan)
        return
    text = "the buffer 'shown' lies in the memory of the parameter 'words.weight', and would not follow it"
    with every_rank_raises(ModelError, text, found_by=0):
        tulle.distribute(model, sgd(model), mesh, plan=plan)


@on_ranks(1, 2)
def test_a_model_that_is_distributed_already():
    model = build(Words, 0)
    distribute(model, sgd(model))
    with every_rank_raises(ModelError, "the model is distributed already: call tulle.distribute once", found_by=0):
        distribute(model, sgd(model))


@on_ranks(1, 2)
def test_a_model_that_ddp_wraps():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    text = "the model is wrapped in DistributedDataParallel, expected a plain one: give model.module"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(1, 2)
def test_a_distributed_model_is_not_wrapped_by_ddp_which_would_overwrite_parts():
    model = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 1))
    tulle.distribute(model, sgd(model), tulle.init(data=-1), plan="rows")
    before = model[0].weight.detach().clone()
    with pytest.raises(ModelError, match="the model is distributed already, and DistributedDataParallel would write"):
        nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model[0].weight.detach(), before)


@on_ranks(2)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_table_that_scales_by_frequency(is_sparse):
    model = nn.Sequential(nn.Embedding(9, 2, sparse=is_sparse, scale_grad_by_freq=True))
    text = "'0' has scale_grad_by_freq=True, which counts in one rank's batch only: split the table, tulle.distribute"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(2)
def test_a_table_with_max_norm_and_dense_gradients():
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=1.0))
    text = "'0' has max_norm=1.0 and dense gradients, so that ranks do not learn which rows the others looked up"
    with every_rank_raises(ModelError, text, found_by=0):
        distribute(model, sgd(model))


@on_ranks(2)
def test_a_table_that_is_the_model_has_no_name_and_its_plan_a_key():
    model = nn.Embedding(9, 2, max_norm=1.0)
    with pytest.raises(ModelError, match=r"^(rank 0: )?the Embedding has max_norm=1.0 .*plan={'weight': 'rows'}\)"):
        distribute(model, sgd(model))


@on_ranks(1)
def test_alone_every_table_will_do():
    model = nn.Sequential(nn.Embedding(9, 2, max_norm=1.0), nn.Embedding(9, 2, scale_grad_by_freq=True))
    distribute(model, sgd(model))
