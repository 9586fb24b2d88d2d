"""Optimizers, clipping, checkpoints and DTensors: what they do does not depend on the layout."""

import copy
import gc
import re
from weakref import ref

import pytest
import torch
from named_models import LanguageModel, batch, d, ff, vocab, worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.comm import barrier
from tulle.errors import CheckpointError, GradientError, ModelError
from tulle.named.module import named_parameters
from tulle.whole_folder import WholeFolder

LAYOUTS = [
    "batch:data, heads:model, d_ff:model, vocab:model",
    "length:data, d_model:model",
    "d_kv:data, d_ff:data, memory_length:model, vocab:model",
]
OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "Adafactor": lambda model: tn.Adafactor(model),
    "Adafactor, plain": lambda model: tn.Adafactor(model, lr=1e-2, scales_by_parameter=False, clip=0.1),
}


def train(optimizer, steps, model=None, clip=0.3):
    model = model or LanguageModel().init(seed=0)
    optimizer = OPTIMIZERS[optimizer](model) if isinstance(optimizer, str) else optimizer
    norms = []
    for _ in range(steps):
        model.loss(*model.sample()).backward()
        norms.append(tn.clip_grad_norm(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, whole(model) | {f"norm {n}": norm for n, norm in enumerate(norms)}


def whole(model):
    return {name: tn.to_torch(one.detach()) for name, one in named_parameters(model)}


@on_ranks(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_and_clipping_agree_under_layouts(optimizer):
    mesh = tulle.init(data=2, model=2)
    *_, expected = train(optimizer, 3)
    for layout in LAYOUTS:
        with tn.use(mesh, layout):
            *_, got = train(optimizer, 3)
            assert worst_difference(got, expected) < 1e-11, layout


@on_ranks(2)
def test_a_model_that_nobody_holds_is_gone():
    mesh = tulle.init(data=2)
    with tn.use(mesh, "batch:data"):
        model, optimizer, _ = train("AdamW", 2)
    held = {name: ref(one.parameter) for name, one in named_parameters(model)}
    del model, optimizer
    gc.collect()
    assert [name for name, parameter in held.items() if parameter() is not None] == []


def test_adafactor_is_that_of_torch_for_matrices():
    model = tn.Module()
    model.weight = tn.param(d, ff, dtype=torch.float64)
    model.init(seed=1)
    twin = nn.Parameter(model.weight.parameter.detach().clone())
    ours = tn.Adafactor(model, lr=1e-2)
    theirs = torch.optim.Adafactor([twin], lr=1e-2, eps=(1e-60, 1e-3))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(3):
        tn.mean(tn.square(tn.from_torch(x, (batch, d)).dot(model.weight, d))).backward()
        (x @ twin).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.parameter, twin, rtol=1e-5, atol=1e-9)


def test_clipping_is_that_of_torch():
    model = LanguageModel().init(seed=0)
    model.loss(*model.sample()).backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    expected = nn.utils.clip_grad_norm_(list(model.parameters()), 0.3)
    clipped = {name: one.grad.clone() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        one.grad = gradients[name]
    torch.testing.assert_close(tn.clip_grad_norm(model, 0.3), expected)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, clipped[name])


@on_ranks(2)
def test_clipping_that_does_not_know_parts_is_refused_where_there_are_some():
    mesh = tulle.init(model=2)
    with tn.use(mesh, "d_ff:model"):
        split = LanguageModel().init(seed=0)
    with pytest.raises(GradientError, match=r"only tulle\.named\.clip_grad_norm knows how it is laid out"):
        tulle.clip_grad_norm_(split, 1.0)
    with pytest.raises(GradientError, match="has a part"):
        tulle.clip_grad_norm_(split.parameters(), 1.0)
    with tn.use(mesh, ""):
        whole = LanguageModel().init(seed=0)
    tulle.clip_grad_norm_(whole, 1.0)


@on_ranks(4)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_a_checkpoint_loads_under_another_layout_and_mesh(optimizer, tmp_path):
    *_, expected = train(optimizer, 4)
    with tn.use(tulle.init(data=2, model=2), LAYOUTS[0]):
        model, trained, _ = train(optimizer, 2)
        tn.save(tmp_path / "saved", model, trained, step=2)
    for axes, layout in (({"model": 4}, "d_ff:model, vocab:model"), ({"data": 2, "model": 2}, "d_ff:data+model")):
        with tn.use(tulle.init(**axes), layout):
            model = LanguageModel().init(seed=5)
            fresh = OPTIMIZERS[optimizer](model)
            assert tn.load(tmp_path / "saved", model, fresh) == {"step": 2}
            *_, got = train(fresh, 2, model)
            expected_parts = {name: expected[name] for name in whole(model)}
            assert worst_difference(got, expected_parts) < 1e-11
    assert not (tmp_path / ".saved.partial").exists()


def test_one_process_saves_and_loads_too_and_what_is_not_there_is_refused(tmp_path):
    *_, expected = train("AdamW", 4)
    model, optimizer, _ = train("AdamW", 2)
    tn.save(tmp_path / "saved", model, optimizer)
    model = LanguageModel().init(seed=5)
    fresh = OPTIMIZERS["AdamW"](model)
    tn.load(tmp_path / "saved", model, fresh)
    *_, got = train(fresh, 2, model)
    assert worst_difference(got, {name: expected[name] for name in whole(model)}) < 1e-12
    with pytest.raises(CheckpointError, match="there is no checkpoint of a named model"):
        tn.load(tmp_path / "nothing", model, fresh)
    other = tn.Module()
    other.other = tn.ones(d)
    other.init()
    with pytest.raises(CheckpointError, match=r"has no 'model.other'"):
        tn.load(tmp_path / "saved", other, torch.optim.SGD(other.parameters()))


@on_ranks(4)
def test_dtensors_come_in_and_go_out():
    mesh = tulle.init(data=2, model=2)
    numbers = torch.arange(32.0).view(4, 8)
    with tn.use(mesh, "batch:data, d_model:model"):
        x = tn.from_torch(numbers, (batch, d))
        placed = tn.to_dtensor(x)
        assert [str(one) for one in placed.placements] == ["S(0)", "S(1)"]
        assert torch.equal(placed.full_tensor(), numbers)
    with tn.use(mesh, "batch:data+model"):
        both = tn.to_dtensor(tn.from_torch(numbers, (batch, d)))
        assert [str(one) for one in both.placements] == ["S(0)", "S(0)"]
        assert torch.equal(both.full_tensor(), numbers)
    with tn.use(mesh, "d_model:data"):
        back = tn.from_dtensor(placed, (batch, d))
        assert back.local.shape == (4, 4)
        assert torch.equal(tn.to_torch(back), numbers)
        with pytest.raises(ModelError, match="from_dtensor was given shape"):
            tn.from_dtensor(placed, (batch, vocab))


@on_ranks(2)
def test_gradients_gather_over_backwards_and_pieces_of_a_batch():
    mesh = tulle.init(data=2)

    def gradients():
        model = LanguageModel().init(seed=0)
        sample = [tn.from_torch(t, dims) for t, dims in zip(model.sample(), [model.dims[:2]] * 2, strict=True)]
        once = model(*sample)
        once.backward()
        model(*sample).backward()
        twice = {name: tn.to_torch(one.grad) for name, one in named_parameters(model)}
        model.zero_grad()
        loss = tn.serialize(model, batch, 2, *sample)
        torch.testing.assert_close(loss.local, once.local.detach(), rtol=1e-12, atol=0)
        return twice | {f"pieces {name}": 2 * tn.to_torch(one.grad) for name, one in named_parameters(model)}

    expected = gradients()
    with tn.use(mesh, "batch:data"):
        got = gradients()
    assert worst_difference(got, expected) < 1e-12
    pieces = {name: expected[f"pieces {name}"] for name in expected if not name.startswith("pieces")}
    assert worst_difference(pieces, {name: expected[name] for name in pieces}) < 1e-12


@on_ranks(2)
def test_an_optimizer_may_be_made_before_the_parameters_are_drawn_and_copies_train_too():
    with tn.use(tulle.init(data=2), "batch:data"):
        model = LanguageModel()
        optimizer = OPTIMIZERS["AdamW"](model)
        *_, expected = train("AdamW", 1)
        *_, got = train(optimizer, 1, model.init(seed=0))
        assert worst_difference(got, expected) == 0
        copied = copy.deepcopy(model)
        *_, got = train("AdamW", 1, copied)
        *_, expected = train("AdamW", 1, model)
        assert worst_difference(got, expected) == 0


@on_ranks(2)
@pytest.mark.parametrize("layout", ["", "d_ff:model"])
def test_tulle_save_refuses_parts_of_which_it_does_not_know(layout, tmp_path):
    model = nn.Sequential(LanguageModel())
    with tn.use(tulle.init(model=2), layout):
        model[0].init()
        optimizer = torch.optim.SGD(model.parameters())
        for action in (
            lambda: tulle.save(tmp_path / "here", model, optimizer),
            lambda: tulle.load(tmp_path / "here", model, optimizer),
            lambda: tulle.full_state_dict(model),
            lambda: tulle.save_safetensors(tmp_path / "here.safetensors", model),
        ):
            with pytest.raises(CheckpointError, match=r"module '0' \(LanguageModel\) .* only tulle.named.save knows"):
                action()


@on_ranks(2)
@pytest.mark.parametrize("layout", ["", "batch:data", "d_ff:data"])
def test_tulle_distribute_refuses_what_is_laid_out_already(layout):
    mesh, model = tulle.init(data=2), nn.Sequential(LanguageModel())
    with tn.use(mesh, layout):
        model[0].init()
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(
            ModelError, match=r"module '0' \(LanguageModel\) was laid out .*: leave tulle.distribute out"
        ):
            tulle.distribute(model, optimizer, mesh)
        with pytest.raises(ModelError, match=r"the model \(LanguageModel\) was laid out over a mesh by tn.use"):
            tulle.distribute(model[0], optimizer, mesh)
    model[0].init()  # on one process by itself: replicas of it, each with a share of the batch
    tulle.distribute(model, optimizer, mesh)


@on_ranks(2)
@pytest.mark.parametrize(
    ("sizes", "shape"), [({"vocab": 24, "d_model": 4}, (24, 4)), ({"d_model": 4, "vocab": 12}, (4, 12))]
)
def test_a_checkpoint_of_other_sizes_is_refused_by_name(sizes, shape, tmp_path):
    def model(**sizes):
        made = tn.Module()
        made.table = tn.param(*tn.dims(**sizes))
        made = made.init()
        return made, torch.optim.Adam(made.parameters())

    with tn.use(tulle.init(data=2), "vocab:data"):
        tn.save(tmp_path / "saved", *model(vocab=12, d_model=4))
        text = f"has 'model.table' of shape (12, 4), the model of {shape}: it is of another model; build this one"
        with pytest.raises(CheckpointError, match=re.escape(text)):
            tn.load(tmp_path / "saved", *model(**sizes))


@on_ranks(2)
def test_a_checkpoint_of_a_larger_model_is_refused_by_what_it_has_besides(tmp_path):
    def model(*names):
        made = tn.Module()
        for name in names:
            setattr(made, name, tn.param(*tn.dims(vocab=12, d_model=4)))
        return made.init()

    with tn.use(tulle.init(data=2), "vocab:data"):
        large, small = model("first", "second"), model("first")
        tn.save(tmp_path / "saved", large, torch.optim.Adam(large.parameters()))
        before = small.first.detach().local.clone()
        with pytest.raises(CheckpointError, match=r"has 'model\.second' besides, which the model has not"):
            tn.load(tmp_path / "saved", small)
        assert torch.equal(small.first.detach().local, before)


@on_ranks(2)
def test_a_checkpoint_that_a_rank_does_not_see_is_refused_on_all(tmp_path):
    mesh = tulle.init(data=-1)
    with tn.use(mesh, "batch:data"):
        model = LanguageModel().init()
        optimizer = OPTIMIZERS["AdamW"](model)
        tn.save(tmp_path / "saved", model, optimizer)
        with pytest.raises(
            CheckpointError, match=r"for rank 1: save one with tn.save, on a file system that all ranks"
        ):
            tn.load(tmp_path / ("elsewhere" if mesh.rank else "saved"), model, optimizer)


@on_ranks(2)
def test_a_model_is_loaded_alone_too(tmp_path):
    mesh = tulle.init(model=2)
    with tn.use(mesh, "d_ff:model"):
        model, optimizer, _ = train("AdamW", 1)
        expected = whole(model)
        tn.save(tmp_path / "saved", model, optimizer, step=1)
    with tn.use(mesh, "vocab:model"):
        model = LanguageModel().init(seed=5)
        assert tn.load(tmp_path / "saved", model) == {"step": 1}
        assert worst_difference(whole(model), expected) == 0


def test_a_model_is_saved_before_its_first_step_too_but_only_with_integers(tmp_path):
    model = LanguageModel().init(seed=0)
    tn.save(tmp_path / "saved", model, OPTIMIZERS["AdamW"](model), step=0)
    _, optimizer, _ = train("AdamW", 1, other := LanguageModel().init(seed=5))
    assert tn.load(tmp_path / "saved", other, optimizer) == {"step": 0}
    *_, expected = train("AdamW", 2, model)
    *_, got = train(optimizer, 2, other)
    assert worst_difference(got, expected) < 1e-12
    with pytest.raises(CheckpointError, match=r"save was given loss=0.25 to save with a model, expected an integer"):
        tn.save(tmp_path / "saved", model, optimizer, loss=0.25)


@on_ranks(2)
def test_what_is_no_checkpoint_is_not_replaced_by_one(tmp_path):
    (tmp_path / "work").mkdir(exist_ok=True)
    (tmp_path / "work" / "thesis.tex").write_text("years of it")
    with tn.use(mesh := tulle.init(data=2), LAYOUTS[0]):
        model = LanguageModel().init(seed=0)
        barrier(mesh["data"])
        for path in (tmp_path / "work", tmp_path / "work" / "thesis.tex"):
            with pytest.raises(CheckpointError, match="is there, and is no checkpoint: tn"):
                tn.save(path, model, OPTIMIZERS["AdamW"](model))
        with pytest.raises(CheckpointError, match="expected one with a name"):
            tn.save(".", model, OPTIMIZERS["AdamW"](model))
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years of it"


@on_ranks(2)
def test_a_checkpoint_that_cannot_be_written_is_said_on_every_rank_and_the_older_one_stays(tmp_path):
    def full(_self):
        raise OSError(28, "No space left on device")

    with tn.use(tulle.init(data=2), LAYOUTS[0]):
        model, optimizer, _ = train("AdamW", 1)
        tn.save(tmp_path / "saved", model, optimizer, step=1)
        for step in ("prepare", "commit"):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(WholeFolder, step, full)
                with pytest.raises(CheckpointError, match=r"saved'.*No space left on device.*older one is as it was"):
                    tn.save(tmp_path / "saved", model, optimizer, step=2)
            assert tn.load(tmp_path / "saved", model, optimizer) == {"step": 1}
        tn.save(tmp_path / "saved", model, optimizer, step=3)
        assert tn.load(tmp_path / "saved", model, optimizer) == {"step": 3}


def test_half_precision_is_clipped_by_its_true_norm():
    model = tn.Module()
    model.weight = tn.param(d, dtype=torch.float16)
    model.init().weight.parameter.grad = torch.full((8,), 300.0, dtype=torch.float16)
    assert tn.clip_grad_norm(model, 1.0).item() == pytest.approx(300 * 8**0.5)
    assert model.weight.parameter.grad.norm().item() == pytest.approx(1, rel=1e-2)
