"""What is wrong is refused by name, on every rank alike, before anything is sent."""

import numpy
import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import named as tn
from tulle.comm import traffic
from tulle.errors import MeshError, ModelError, PlanError
from tulle.named import layers

batch, length, memory, d, heads, d_kv = tn.dims(batch=4, length=6, memory_length=6, d_model=8, heads=4, d_kv=2)


def ones(*dims):
    return tn.from_torch(torch.ones([dim.size for dim in dims]), dims)


@pytest.mark.parametrize("size", [0, -2, 2.5, True, "4", None])
def test_a_dimension_of_a_size_that_nothing_has_is_refused(size):
    text = f"dimension 'rows' was given size {size!r}, expected a positive integer"
    refused(ModelError, text, lambda: tn.Dim("rows", size))
    refused(ModelError, text, lambda: tn.dims(rows=size))
    refused(ModelError, text, lambda: tn.Dim("rows", 4).resized(size))


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_dimension_without_a_name_is_refused(name):
    refused(ModelError, f"a dimension was given the name {name!r}, expected text", lambda: tn.Dim(name, 4))


class Declared(tn.Module):
    def __init__(self):
        super().__init__()
        self.weight = tn.param(d, heads)

    def forward(self, x):
        return x.dot(self.weight, d)


def refused(kind, text, action):
    before = traffic.total.messages
    with pytest.raises(kind) as caught:
        action()
    assert text in str(caught.value)
    assert traffic.total.messages == before, "nothing is sent before an error"


@on_ranks(2)
def test_two_dimensions_of_a_tensor_on_one_axis_are_refused():
    with tn.use(tulle.init(model=2), "d_model:model, heads:model"):
        refused(
            PlanError,
            "(d_model=8, heads=4) has dimensions 'd_model' and 'heads' both split over mesh axis 'model': "
            "take one of them out of the layout, or rename it before the operation",
            lambda: ones(d, heads),
        )


@on_ranks(2)
def test_two_dimensions_of_an_operation_on_one_axis_are_refused():
    with tn.use(tulle.init(model=2), "d_model:model, heads:model"):
        x, y = ones(batch, d), ones(batch, heads)
        refused(PlanError, "einsum over (batch=4, d_model=8, heads=4)", lambda: tn.einsum(x, y, out=batch))
        refused(PlanError, "dot over (batch=4, d_model=8, heads=4)", lambda: x.dot(y, batch))
        refused(PlanError, "mul of (batch=4, d_model=8, heads=4)", lambda: x * y)


@on_ranks(4)
def test_a_size_that_does_not_divide_is_refused_and_the_mend_is_named():
    with tn.use(tulle.init(model=4), "length:model"):
        refused(
            PlanError,
            "dimension 'length' of size 6 does not divide evenly among the 4 ranks of mesh axis 'model': pad it to 8",
            lambda: ones(batch, length),
        )


@on_ranks(4)
def test_a_dimension_over_two_axes_is_held_to_the_same_rules():
    with tn.use(tulle.init(data=2, model=2), "batch:data+model, heads:model, length:model+data"):
        assert repr(ones(batch)) == "Tensor(batch=4/data+model; float32)"
        assert ones(batch).local.shape == (1,)
        refused(PlanError, "'batch' and 'heads' both split over mesh axis 'model'", lambda: ones(batch) * ones(heads))
        refused(PlanError, "among the 4 ranks of mesh axis 'data+model': pad it to 8", lambda: ones(length))


@on_ranks(2)
def test_a_parameter_that_is_not_legal_is_named():
    model = tn.Module()
    model.inner = tn.Module()
    model.inner.weight = tn.param(d, heads)
    with tn.use(tulle.init(model=2), "d_model:model, heads:model"):
        refused(PlanError, "parameter inner.weight (d_model=8, heads=4)", model.init)


@on_ranks(2)
def test_a_rule_that_nearly_names_something_is_refused():
    mesh = tulle.init(model=2)
    with (
        pytest.raises(PlanError, match=r"rule 'head:model' names the dimension 'head'.* but 'heads' is"),
        tn.use(mesh, "head:model"),
    ):
        pass
    with (
        pytest.raises(PlanError, match=r"rule 'heads:modle' names the axis 'modle'.* but 'model' is"),
        tn.use(mesh, "heads:modle"),
    ):
        pass
    with tn.use(mesh, "experts:model, batch:data"):  # neither is here: one set of rules serves every model and mesh
        assert ones(batch).local.shape == (4,)


@on_ranks(2)
def test_a_tensor_of_another_layout_is_refused():
    mesh = tulle.init(model=2)
    with tn.use(mesh, "heads:model"):
        x = ones(batch, heads)
    with tn.use(mesh, "heads:model"):
        assert (x + x).dims == x.dims, "the same mesh and layout are one scope"
        total = tn.sum(x, heads)
    with tn.use(mesh, "batch:model"):
        refused(ModelError, "bring it over with tn.to_torch and tn.from_torch", lambda: x + 1 + x)
    with tn.use(mesh, "heads:model, length:model"):
        refused(ModelError, "which lives under", lambda: tn.sum(ones(batch, heads), heads) + total)  # both pending
    refused(ModelError, "which lives under mesh (model=2), Layout('heads:model')", lambda: tn.sum(x))


def test_a_parameter_must_be_initialized_where_it_is_used():
    with pytest.raises(ModelError, match=r"which lives under no layout yet.* call init\(seed\) of the model"):
        ones(batch, d).dot(Declared().weight, d)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda: tn.dims(batch=0), "dimension 'batch' was given size 0, expected a positive integer"),
        (lambda: tn.Layout("batch=data"), "rule 'batch=data' is not of the form 'dimension:axis'"),
        (lambda: tn.Layout("batch:data, batch:model"), "'batch:data+model' splits it over both"),
        (lambda: tn.Layout("batch:data+data"), "must name one axis, or several joined by '+', each once"),
        (lambda: ones(d) + ones(d.resized(4)), "dimension 'd_model' has size 8 in one tensor of the operation and 4"),
        (lambda: ones(batch).dot(ones(d), d), "dot was given dimension d_model=8, but the tensor has (batch=4)"),
        (lambda: ones(batch, length).rename(lenght=memory), "none is called 'lenght'"),
        (lambda: ones(batch, length).rename(length=d), "rename of length=6 to d_model=8 changes the size"),
        (lambda: ones(length, memory).rename(length=memory), "has one name twice"),
        (lambda: tn.einsum(ones(batch), out=(batch, d)), "einsum is to give dimension d_model=8, which no input has"),
        (lambda: tn.einsum(ones(d), out=batch), "einsum is to give dimension batch=4, which no input has"),
        (lambda: tn.to_torch(torch.ones(3)), "to_torch was given a Tensor, expected a tensor of named dimensions"),
        (lambda: tn.explain(Declared(), ones(d), 4, ""), "explain was given 4 as mesh, expected what tulle.init"),
        (lambda: tn.explain(Declared(), ones(d), {"data": "2"}, ""), "with data='2', expected a positive number"),
        (
            lambda: tn.best_layout(Declared(), ones(d), "4"),
            "best_layout was given '4' as mesh, expected",
        ),
        (lambda: tn.best_layout(Declared(), ones(d), 0), "with ranks=0, expected a positive number of ranks"),
        (lambda: tn.from_torch(torch.ones(4, 5), (batch, d)), "of shape (4, 5) for dimensions (batch=4, d_model=8)"),
        (lambda: tn.from_local(torch.ones(3), batch), "a part of shape (3,) of dimensions (batch=4), expected (4,)"),
        (lambda: ones(batch).backward(), "backward was called on a tensor with dimensions (batch=4)"),
        (lambda: tn.sum(ones(batch), d), "sum was given dimension d_model=8"),
        (lambda: tn.split(ones(d), d, (heads, heads)), "the sizes must multiply to 8"),
        (lambda: tn.slice(ones(d), d, heads, start=5), "slice of d_model=8 from 5 to 9 goes beyond it"),
        (lambda: tn.pad(ones(heads), heads, d, before=5), "pad of heads=4 by 5 in front gives more than d_model=8"),
        (lambda: tn.stack([ones(d)], heads), "stack was given 1 tensors for heads=4"),
        (lambda: tn.stack([ones(d), ones(batch)], d_kv), "Tensor(batch=4; float32) among tensors of (d_model=8)"),
        (lambda: tn.halo(ones(d), d, (heads, d_kv), before=1), "halo of d_model=8 by heads=4 with 1 before cannot"),
        (lambda: tn.sum(ones(d), "d_model"), "'d_model' was given as a dimension, expected the dimension itself"),
        (lambda: tn.param(4, 8), "4 was given as a dimension, expected the dimension itself"),
        (lambda: ones(length).rename(length="memory"), "'memory' was given as a dimension"),
        (lambda: tn.from_torch([1.0], d), "from_torch was given list, expected a plain tensor, then its dimensions"),
        (lambda: torch.relu(ones(d)), "torch's relu was given a named tensor"),
        (lambda: torch.ones(8) + ones(d), "torch's add was given a named tensor"),
        (lambda: ones(d) + torch.ones(8), "add was given a plain tensor of shape (8,) beside named tensors"),
        (lambda: ones(d) * torch.ones(()), "mul was given a plain tensor of shape () beside named tensors"),
        (lambda: bool(ones(d) > 0), "which has dimensions: reduce them first"),
        (lambda: tn.Layout(None), "a layout was made of None, expected text such as"),
        (lambda: tn.Adafactor(Declared()), "parameter weight (d_model=8, heads=4) lives elsewhere: call init(seed)"),
        (lambda: tn.Adafactor(Declared().parameters()), "a generator was given, expected the model itself"),
        (lambda: tn.clip_grad_norm(list(Declared().parameters()), 1.0), "a list was given, expected the model itself"),
        (lambda: tn.use(tulle.init(), None).__enter__(), "a layout was made of None, expected text such as"),
        (
            lambda: tn.wrap(torch.nn.Linear(8, 3), d, heads)(ones(d)),
            "Linear gave a tensor of shape (3,), expected (4,)",
        ),
        (
            lambda: tn.wrap(torch.nn.ReLU(), d, d)(ones(batch, heads)),
            "wrap was given dimension d_model=8, but the tensor has (batch=4, heads=4): name one of these",
        ),
        (lambda: tn.concat([ones(d), ones(d)], [d, d], heads), "cannot give heads=4"),
        (lambda: tn.gather(ones(d, heads), ones(batch), d), "expected integers without that dimension"),
        (lambda: tn.dropout(ones(d), 1.0), "dropout was given the share 1.0"),
        (lambda: tn.top_k(ones(heads), heads, d), "there are not so many"),
        (lambda: tn.sample(ones(heads), heads, temperature=-1), "expected 0 or more"),
        (lambda: tn.serialize(tn.mean, batch, 3, ones(batch)), "serialize was asked for 3 pieces of batch=4"),
        (lambda: tn.serialize(tn.mean, "batch", 2, ones(batch)), "'batch' was given as a dimension"),
        (lambda: tn.concat([ones(d), ones(d)], ["d_model", d], batch), "'d_model' was given as a dimension"),
        (lambda: tn.top_k(ones(heads), heads, 2), "2 was given as a dimension"),
        (lambda: tn.range("heads"), "'heads' was given as a dimension"),
        (lambda: tn.sum(ones(d), (d, d)), "sum over (d_model=8, d_model=8) has one name twice"),
        (lambda: tn.softmax(ones(batch, d), (d, d)), "softmax over (d_model=8, d_model=8) has one name twice"),
        (lambda: tn.merge(ones(batch, d), (d, d), length), "merge of (d_model=8, d_model=8) has one name twice"),
        (
            lambda: tn.concat([ones(batch, d)] * 2, [d, d], batch.resized(16)),
            "concat to (batch=4, batch=16) has one name",
        ),
        (lambda: tn.zeros((d, d)), "full (d_model=8, d_model=8) has one name twice"),
        (lambda: tn.zeros(8), "8 was given as a dimension"),
        (lambda: tn.one_hot(ones(batch), batch), "one_hot to (batch=4, batch=4) has one name twice"),
        (lambda: tn.causal_bias(length, length), "causal_bias of (length=6, length=6) has one name twice"),
        (
            lambda: tn.attention(ones(length, d), ones(length, d), ones(memory, d), (length, memory, d)),
            "attention's key was given dimension memory_length=6, but the tensor has (length=6, d_model=8)",
        ),
        (
            lambda: tn.attention(ones(length, memory, d), ones(memory, d), ones(memory, d), (length, memory, d)),
            "has memory_length=6: rename the memory's length before its product",
        ),
        (
            lambda: tn.attention(
                ones(length, d), ones(memory, d), ones(memory, d), (length, memory, d), bias=tn.mask(memory, 3)
            ),
            "(memory_length=6; bool) as its bias, which is added: make a mask one with tn.where(mask, 0.0, -inf)",
        ),
        (lambda: tn.Layout("batch:data:model"), "rule 'batch:data:model' is not of the form"),
        (lambda: ones(d).dot(torch.ones(8), d), "dot was given a plain tensor of shape (8,) beside named tensors"),
        (lambda: tn.einsum(ones(d), 3, out=d), "einsum was given 3 beside named tensors"),
        (lambda: tn.gather(ones(d), torch.ones(8), d), "gather was given a plain tensor of shape (8,)"),
        (lambda: tn.elementwise(torch.sum, ones(d)), "sum makes shape () of what has (8,), so it is not elementwise"),
        (lambda: ones(d).map(torch.sum), "a function that makes shape () of (8,)"),
        (
            lambda: tn.cross_entropy(ones(batch, d), ones(batch), d),
            "expected integers without that dimension and a",
        ),
        (lambda: tn.serialize(tn.mean, batch, 0, ones(batch)), "serialize was asked for 0 pieces of batch=4"),
        (lambda: tn.serialize(lambda x: 3, batch, 2, ones(batch)), "serialize, as its loss, was given 3"),
        (lambda: tn.recompute(lambda x: 3, ones(batch)), "recompute, as what its function gives, was given 3"),
        (lambda: tn.clip_grad_norm(Declared(), -1.0), "clip_grad_norm was given max_norm=-1.0, expected 0 or more"),
        (lambda: layers.RelativeBias(d_kv, heads, is_causal=False), "given d_kv=2, expected 4 or more: some near"),
        (lambda: layers.Experts(d, heads, d_kv, gating="top"), "gating='top', expected 'switch' or 'top-2'"),
        (
            lambda: tn.convolution(ones(length, d), ones(d_kv, d, heads), [(length, d_kv)], (d, heads), stride=0),
            "convolution was given stride=0 and dilation=1, expected 1 or more",
        ),
        (
            lambda: tn.convolution(ones(length, d), ones(d_kv, d, heads), (length, d_kv), (d, heads)),
            "convolution was given (length=6, d_kv=2) to move along, expected a list such as [(width, kernel)]",
        ),
        (
            lambda: tn.transposed_convolution(ones(length, d), ones(d_kv, d, heads), [(length, 2)], (d, heads)),
            "2 was given as a dimension, expected the dimension itself",
        ),
        (lambda: tn.manual_seed("a"), "manual_seed was given the seed 'a', expected an integer"),
        (lambda: Declared().init(0.5), "init was given the seed 0.5, expected an integer"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(action, text):
    with pytest.raises((MeshError, ModelError, PlanError)) as caught:
        action()
    assert text in str(caught.value)


def test_a_seed_of_numpy_is_an_integer_too():
    seed, x = numpy.int64(3), ones(batch, d)
    torch.testing.assert_close(Declared().init(seed).weight.part, Declared().init(3).weight.part)
    tn.manual_seed(seed)
    dropped = tn.dropout(x, 0.5).local
    tn.manual_seed(3)
    torch.testing.assert_close(tn.dropout(x, 0.5).local, dropped)


@on_ranks(2)
def test_what_comes_late_in_an_operation_is_refused_before_its_first_exchange():
    with tn.use(tulle.init(model=2), "d_model:model"):
        x, twice = ones(batch, d), d.resized(16)
        refused(ModelError, "among tensors of (batch=4, d_model=8)", lambda: tn.concat([x, ones(d)], [d, d], twice))
        refused(ModelError, "rms_norm was given a plain tensor", lambda: tn.rms_norm(x, d, torch.ones(8)))
        refused(ModelError, "and 16 in another", lambda: tn.layer_norm(x, d, None, ones(twice)))
        refused(ModelError, "top_k of (d_model=8, d_model=8) has one name twice", lambda: tn.top_k(x, d, d))
        targets = tn.from_torch(torch.zeros(4, 8, dtype=torch.int64), (batch, d))
        refused(ModelError, "expected integers without that dimension", lambda: tn.cross_entropy(x, targets, d))


@on_ranks(2)
@pytest.mark.parametrize("layout", ["", "d_model:model"])
def test_indices_beyond_a_dimension_are_refused_whether_it_is_split_or_not(layout):
    with tn.use(tulle.init(model=2), layout):
        index = tn.from_torch(torch.tensor([0, -100, 8, 2]), batch)  # torch's cross entropy would leave -100 out
        text, table, logits = "over d_model=8 was given indices from -100 to 8", ones(d, heads), ones(batch, d)
        refused(ModelError, f"gather {text}, expected 0 to 7", lambda: tn.gather(table, index, d))
        refused(ModelError, f"cross_entropy {text}", lambda: tn.cross_entropy(logits, index, d))
        refused(ModelError, "with tn.where", lambda: tn.cross_entropy(logits, index, d, label_smoothing=0.1))


@on_ranks(4)
def test_the_repr_shows_the_layout_and_what_is_pending():
    with tn.use(tulle.init(data=2, model=2), "batch:data, heads:model"):
        x = ones(batch, heads)
        assert repr(x) == "Tensor(batch=4/data, heads=4/model; float32)"
        assert repr(tn.sum(x, heads)) == "Tensor(batch=4/data; float32; sum over model pending)"


@on_ranks(2)
def test_tensors_of_another_layout_are_refused_by_operations_of_one_input_too():
    x = ones(batch, d)
    with tn.use(tulle.init(model=2), "batch:model"):
        for action in (
            lambda: tn.argmax(x, d),
            lambda: tn.unstack(x, d),
            lambda: tn.top_k(x, d, heads),
            lambda: tn.broadcast_to(x, (batch, length, d)),
        ):
            refused(ModelError, "which lives under one process without a mesh, but in force is mesh (model=2)", action)


def test_dimensions_that_were_made_directly_are_declared_too():
    tn.dims(rows_of_many=4)
    assert tn.Dim("rows_of_mary", 4).name == "rows_of_mary"
    tn.Layout("rows_of_mary:data").check_spelling(["data"])
    with pytest.raises(PlanError, match="'rows_of_marx', which is not there, but 'rows_of_mary' is"):
        tn.Layout("rows_of_marx:data").check_spelling(["data"])


class Bare(tn.Module):
    def __init__(self):
        self.weight, self.plain = tn.param(d, heads), torch.nn.Linear(2, 2)


class Early(Declared):
    def __init__(self):
        self.first, self.plain = tn.param(d), torch.nn.Linear(2, 2)
        super().__init__()


def test_attributes_stay_wherever_the_constructor_of_the_base_is_called_if_at_all():
    for model, names in [(Bare().init(), {"weight"}), (Early().init(), {"first", "weight"})]:
        assert {name for name, _ in model.named_parameters()} == names | {"plain.weight", "plain.bias"}
        assert str(model.weight) == "Parameter weight(d_model=8, heads=4; float32)"


def test_what_plain_tensors_have_and_named_ones_do_not_is_told_where_it_is():
    x, w = ones(batch, d), ones(d, heads)
    for action in (lambda: x @ w, lambda: x @ 2.0, lambda: 2.0 @ x):
        refused(ModelError, "say over which, x.dot(w, d), or what remains, tn.einsum(x, w, out=(", action)
    for name in ("shape", "softmax", "max", "view"):
        with pytest.raises(AttributeError, match=rf"a named tensor has no attribute '{name}': .*, tn.softmax\(x, d\)"):
            getattr(x, name)
    assert not hasattr(x, "numpy")
