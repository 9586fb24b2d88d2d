"""Models as Hugging Face wrote them, on several stages; all of the zoo is in `benchmarks/pipeline`."""

import copy
from typing import Any

import pytest
import torch
from pipeline_networks import one_process, worst_gradient
from torch import Tensor, nn

import tulle
from ranks import on_ranks
from tulle import pipeline

SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "T5": {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "dropout_rate": 0.0},
    "Llama": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
}
KINDS = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration", "Llama": "LlamaForCausalLM"}


class Losses(nn.Module):
    """A language model's loss of a batch of token ids."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, labels=ids).loss


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize("family", list(SIZES))
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model_equals_one_process(family):
    hf = pytest.importorskip("transformers")
    mesh = tulle.init(pipe=-1)
    torch.manual_seed(0)
    settings = {"vocab_size": 40, "use_cache": False, "decoder_start_token_id": 0, **SIZES[family]}
    model = Losses(getattr(hf, KINDS[family])(getattr(hf, f"{family}Config")(**settings))).double()
    reference = copy.deepcopy(model)
    ids = torch.randint(3, 40, (6, 7), generator=torch.Generator().manual_seed(1))
    pipeline.place(model, mesh["pipe"], sample=ids[:2])
    step = pipeline.step(micro_batches=3)(squared_loss)
    losses = step(model, ids).stack().tolist()
    assert losses == one_process(reference, ids, 3, 0, 0)
    assert worst_gradient(model, reference) < 1e-14


def squared_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(ids).pow(2).mean()
    loss.backward()
    return loss
