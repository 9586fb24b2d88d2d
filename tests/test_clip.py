"""Clipping scales sparse and dense gradients alike, with torch's own numbers where torch has any."""

import copy
import math

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.clip import Spread, spread_over
from tulle.errors import GradientError

NORMS = [1.0, 2.0, 3.5, math.inf]


class Mixed(nn.Module):
    """A table, sparse or dense, and a layer."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=is_sparse)
        self.layer = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids)).pow(2).sum()


def pair() -> tuple[Mixed, Mixed]:
    """Two models of the same numbers with gradients, one with a sparse table, that has duplicates."""
    torch.manual_seed(0)
    sparse = Mixed(is_sparse=True).double()
    dense = Mixed(is_sparse=False).double()
    dense.load_state_dict(sparse.state_dict())
    ids = torch.tensor([4, 1, 4, 4, 0])
    sparse(ids).backward()
    dense(ids).backward()
    assert not sparse.table.weight.grad.is_coalesced()
    return sparse, dense


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.01, 1e6, 0.0])
def test_norm_and_gradients_are_torchs(norm_type, max_norm):
    sparse, dense = pair()
    ours = tulle.clip_grad_norm_(sparse, max_norm, norm_type)
    theirs = nn.utils.clip_grad_norm_(dense.parameters(), max_norm, norm_type)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradients(sparse), gradients(dense), rtol=1e-13, atol=0)


@pytest.mark.parametrize("norm_type", NORMS)
def test_dense_gradients_alone_are_torchs_to_the_last_bit(norm_type):
    _, ours = pair()
    theirs = copy.deepcopy(ours)
    for clone, parameter in zip(theirs.parameters(), ours.parameters(), strict=True):
        clone.grad = None if parameter.grad is None else parameter.grad.clone()
    norm = tulle.clip_grad_norm_(ours.parameters(), 0.1, norm_type)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, norm_type))
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), gradients(theirs), strict=True))


def test_duplicates_are_summed_before_the_norm_is_taken():
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 1])).sum().backward()
    assert tulle.clip_grad_norm_(table, 1.0).item() == pytest.approx(3.0)  # not the root of three
    assert table.weight.grad.to_dense()[1].item() == pytest.approx(1.0)


def test_a_clipped_sparse_gradient_is_still_sparse():
    sparse, _ = pair()
    tulle.clip_grad_norm_(sparse, 0.1)
    assert sparse.table.weight.grad.layout == torch.sparse_coo
    torch.optim.SparseAdam([sparse.table.weight]).step()


def test_a_gradient_within_the_norm_stays_as_it_is():
    sparse, _ = pair()
    before = [gradient.clone() for gradient in gradients(sparse)]
    tulle.clip_grad_norm_(sparse, 1e6)
    assert all(torch.equal(a, b) for a, b in zip(gradients(sparse), before, strict=True))


@pytest.mark.parametrize("norm_type", NORMS)
def test_a_batch_of_padding_only_has_norm_zero(norm_type):
    table = nn.Embedding(4, 2, sparse=True, padding_idx=0)
    table(torch.tensor([0, 0])).sum().backward()
    assert table.weight.grad._nnz() == 0
    assert tulle.clip_grad_norm_(table, 1.0, norm_type).item() == 0.0


def test_without_gradients_the_norm_is_zero():
    assert tulle.clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0
    assert tulle.clip_grad_norm_([], 1.0).item() == 0.0


def test_one_parameter_or_a_generator_of_them_will_do():
    sparse, _ = pair()
    whole = tulle.clip_grad_norm_((p for p in sparse.parameters()), 1e6)
    assert whole == tulle.clip_grad_norm_(sparse, 1e6)
    assert tulle.clip_grad_norm_(sparse.layer.bias, 1e6) == sparse.layer.bias.grad.norm()


def test_gradients_of_several_dtypes_have_one_norm():
    parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    assert tulle.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(5.0)
    assert [p.grad.item() for p in parameters] == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_raised_with_the_parameters_name(value):
    sparse, _ = pair()
    sparse.table.weight.grad = sparse.table.weight.grad.coalesce()
    sparse.table.weight.grad._values()[0, 0] = value
    before = sparse.layer.weight.grad.clone()
    with pytest.raises(
        GradientError, match=r"norm is (nan|inf), expected a finite one; .* blame is table.weight: call"
    ):
        tulle.clip_grad_norm_(sparse, 1.0, error_if_nonfinite=True)
    assert torch.equal(sparse.layer.weight.grad, before), "a gradient was scaled before it raised"


def test_a_parameter_without_a_name_is_named_by_its_number():
    sparse, _ = pair()
    sparse.layer.bias.grad.fill_(math.nan)
    with pytest.raises(GradientError, match="blame is number 2: "):
        tulle.clip_grad_norm_(sparse.parameters(), 1.0, error_if_nonfinite=True)


def test_unless_asked_for_a_norm_that_is_not_finite_is_returned_as_in_torch():
    sparse, dense = pair()
    sparse.layer.bias.grad.fill_(math.nan)
    dense.layer.bias.grad.fill_(math.nan)
    assert tulle.clip_grad_norm_(sparse, 1.0).isnan()
    assert nn.utils.clip_grad_norm_(dense.parameters(), 1.0).isnan()
    assert all(gradient.isnan().all() for gradient in gradients(sparse.layer) + gradients(dense.layer))
    assert sparse.table.weight.grad._values().isnan().all()


def test_finite_gradients_pass_the_check():
    sparse, _ = pair()
    tulle.clip_grad_norm_(sparse, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("is_spread", [False, True])
def test_gradients_of_complex_numbers_have_a_real_norm(is_spread):
    parameters = [nn.Parameter(torch.full((3,), 3 + 4j)), nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
        if is_spread:  # over an axis of one rank
            spread_over(parameter, Spread((tulle.init(data=-1)["data"],), counts=True))
    total = tulle.clip_grad_norm_(parameters, 1.0)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(77**0.5)
    assert torch.linalg.vector_norm(torch.cat([p.grad for p in parameters])).item() == pytest.approx(1.0)


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_parameter_that_is_whole_on_every_rank_counts_once_beside_those_of_split_models(norm_type):
    mesh = tulle.init(pipe=2, model=-1)
    pipe, model = mesh["pipe"], mesh["model"]
    of_stage, of_layer, whole = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3))
    of_stage.grad = torch.tensor([1.0, 2.0 + pipe.rank], dtype=torch.float64)
    of_layer.grad = torch.tensor([3.0, 5.0 + model.rank], dtype=torch.float64)
    whole.grad = torch.tensor([4.0, 7.0], dtype=torch.float64)
    spread_over(of_stage, Spread((pipe,), counts=True))
    spread_over(of_layer, Spread((model,), counts=True))
    parts = [1.0, 2.0, 1.0, 3.0, *(number for rank in range(model.size) for number in (3.0, 5.0 + rank)), 4.0, 7.0]
    total = tulle.clip_grad_norm_([whole, of_stage, of_layer], 1.0, norm_type)
    assert total.item() == pytest.approx(torch.linalg.vector_norm(torch.tensor(parts), norm_type).item())
