"""`torch.compile` of a named model: one graph on one process, on several some between exchanges; the same numbers."""

import pytest
import torch
from named_models import LanguageModel, batch, length

import tulle
from ranks import on_ranks
from tulle import named as tn

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler


def compare(*, is_whole_graph):
    model = LanguageModel().init(seed=0)

    def loss_of(ids, targets):
        return model(tn.from_torch(ids, (batch, length)), tn.from_torch(targets, (batch, length))).local

    expected = loss_of(*model.sample())
    expected.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=is_whole_graph)
    loss = compiled(*model.sample())
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name], rtol=1e-12, atol=1e-14)


def test_on_one_process_a_step_is_one_graph():
    compare(is_whole_graph=True)


@pytest.mark.slow
@on_ranks(2)
def test_on_several_processes_graphs_end_at_exchanges():
    with tn.use(tulle.init(data=2), "batch:data"):
        compare(is_whole_graph=False)
