"""What layouts send is as little as it can be: golden counts of collectives, forward and backward."""

import pytest
import torch
from named_models import LanguageModel, batch, d, ff, length, vocab
from test_explain import sample_of

from tulle import named as tn

e, g, d2 = tn.dims(e=8, g=4, d2=8)


def kinds(model, sample, layout, sizes=None):
    """How often each kind of collective happens in a step, and the labels."""
    told = tn.explain(model, sample, sizes or {"data": 2, "model": 2}, layout)
    counts = {}
    for one in told.collectives:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return counts


def model_of(forward, **parameters):
    model = tn.Module()
    for name, dims in parameters.items():
        setattr(model, name, tn.param(*dims))
    model.forward = lambda *inputs: forward(model, *inputs)
    return model


def tensor(*dims):
    return tn.from_torch(torch.empty([dim.size for dim in dims], device="meta"), dims)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("", {}),
        ("batch:data", {"all-reduce": 2}),  # the loss, and all parameters' gradients together
        ("batch:data, d_ff:model", {"all-reduce": 4}),  # and the sum of the second product, and f of the first
        ("heads:model", {"all-reduce": 2}),  # the sum of the heads, and the gradient of what all three products share
        ("d_ff:model", {"all-reduce": 2}),
        ("vocab:model", {"all-reduce": 6}),
    ],
)
def test_collectives_of_the_language_model(layout, expected):
    counts = kinds(LanguageModel(), sample_of("language model"), layout)
    assert counts == expected


def test_three_inputs_that_enter_over_the_same_axes_enter_once():
    model = model_of(
        lambda m, x: tn.mean(m.a.dot(tn.tanh(x.dot(m.pre, d)), d2) * m.b.dot(tn.tanh(x.dot(m.pre, d)), d2)),
        pre=(d, d2), a=(d2, e), b=(d2, e),
    )  # fmt: skip
    apart = kinds(model, tensor(batch, d), "e:model")

    def shared(m, x):
        y = tn.tanh(x.dot(m.pre, d))
        return tn.mean(m.a.dot(y, d2) * m.b.dot(y, d2))

    together = kinds(model_of(shared, pre=(d, d2), a=(d2, e), b=(d2, e)), tensor(batch, d), "e:model")
    assert apart["all-reduce"] - together["all-reduce"] == 1


def test_sums_stay_pending_through_additions_scalings_and_sums():
    def added(m, x):
        return tn.sum((x.dot(m.a, d) * 0.5 + x.dot(m.b, d)) / 2, (batch, e))

    counts = kinds(model_of(added, a=(d, e), b=(d, e)), tensor(batch, d), "d_model:model")
    assert counts == {"all-reduce": 1}


def test_a_pending_sum_that_is_renamed_to_a_split_dimension_is_reduce_scattered():
    def renamed(m, x):
        return tn.mean(tn.square(x.dot(m.a, d).rename(e=d2)))

    counts = kinds(model_of(renamed, a=(d, e)), tensor(batch, d), "d_model:model, d2:model")
    # Forward the reduce-scatter and the mean; backward the gather that undoes it.
    assert counts == {"all-to-all": 1, "all-reduce": 1, "all-gather": 1}


def test_a_gather_that_enters_at_once_is_reduce_scattered_in_backward():
    def gathered(m, x):
        y = tn.tanh(x.dot(m.a, d))
        return tn.mean(y.rename(e=d2).dot(m.b, d2))

    counts = kinds(model_of(gathered, a=(d, e), b=(d2, ff)), tensor(batch, d), "e:model, d_ff:model")
    assert counts == {"all-gather": 1, "all-to-all": 1, "all-reduce": 1}


def test_what_is_split_and_renamed_to_what_another_dimension_is_goes_by_all_to_all():
    def moved(m, x):
        return tn.mean(tn.square(x.dot(m.a, d).rename(batch=g, e=d2)))

    counts = kinds(model_of(moved, a=(d, e)), tensor(batch, d), "batch:data, d2:data")
    assert counts == {"all-to-all": 2, "all-reduce": 2}


def test_a_word_table_that_is_split_sends_no_rows():
    def embedded(m, ids):
        return tn.mean(tn.gather(m.table, ids, vocab))

    ids = tn.from_torch(torch.zeros(batch.size, length.size, dtype=torch.int64), (batch, length))
    told = tn.explain(model_of(embedded, table=(vocab, d)), ids, {"model": 2}, "vocab:model")
    assert [one.tensor_bytes for one in told.collectives] == [4]  # the mean, which the sum over words stays pending for


def test_the_first_bucket_of_gradients_is_small_and_the_rest_goes_together():
    wide, other = tn.dims(wide=512, other=512)  # a parameter of both is a bucket of its own, if it comes first

    def chained(m, x):
        for name in "abcd":
            x = tn.tanh(x.dot(getattr(m, name), wide)).rename(other=wide)
        return tn.mean(x)

    model = model_of(chained, a=(wide, other), b=(wide, other), c=(wide, other), d=(wide, other))
    told = tn.explain(model, tensor(batch, wide), {"data": 2}, "batch:data")
    sizes = [one.tensor_bytes for one in told.collectives if one.label == "named parameter gradients"]
    assert sizes == [2**20, 3 * 2**20]


def test_a_pending_sum_that_a_softmax_looks_at_twice_is_summed_once():
    def looked(m, x):
        return tn.mean(tn.square(tn.softmax(x.dot(m.a, d), e)))

    counts = kinds(model_of(looked, a=(d, e)), tensor(batch, d), "d_model:model, e:data")
    # Forward that sum, the largest, the denominator and the mean; backward those of the denominator and of x's use.
    assert counts == {"all-reduce": 5}
