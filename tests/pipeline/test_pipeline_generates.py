"""Words generated one after the other by models on several stages, with a cache that their layers fill."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tulle
from crossing import crossed
from ranks import on_ranks
from tulle import pipeline

WORDS, WIDTH = 12, 6


class Cache:
    """What earlier words have left for each layer, as Hugging Face's caches do."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Layer(nn.Module):
    """Gives, beside its result, numbers of all that it has seen: how many does not follow from the arguments."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        earlier = cache.kept.get(self.number)
        cache.kept[self.number] = seen = x if earlier is None else torch.cat([earlier, x], 1)
        return torch.tanh(self.linear(seen.mean(1, keepdim=True)) + x), seen.sum(2)


class Speaker(nn.Module):
    """Looks words up, and gives scores of what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, cache: Cache) -> Tensor:
        x, bias = self.words(ids), torch.zeros(())
        for layer in self.layers:
            x, one = layer(x, cache)
            bias = bias + one
        return self.head(x[:, -1]) + bias.mean(1, keepdim=True)


def spoken(model: nn.Module, count: int) -> list[int]:
    ids, cache = torch.tensor([[1, 2, 3]]), Cache()
    found: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            scores = model(ids, cache)
            ids = scores.argmax(1, keepdim=True)
            found += [int(ids), *[round(one, 12) for one in scores[0].tolist()]]
    return found


@on_ranks(2, 3)
def test_what_a_cache_has_grown_to_is_told_at_each_word():
    torch.manual_seed(0)
    model = Speaker().double()
    reference = copy.deepcopy(model)
    axis = tulle.init(pipe=-1, timeout=8)["pipe"]
    pipeline.place(model, axis, {"words": 0, **{f"layers.{n}": n % axis.size for n in range(3)}, "head": 0})
    for count in (5, 3):
        assert spoken(model, count) == spoken(reference, count)


STAGES: dict[str, dict[str, int]] = {
    "GPT2": {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h.0": 0, "transformer.h.1": 1, "lm_head": 1},
    "T5": {"shared": 0, "encoder": 0, "decoder.block.0": 0, "decoder.block.1": 1, "lm_head": 1},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "bos_token_id": 0},
    "T5": {"num_layers": 2, "d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0},
}
KINDS = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}


@on_ranks(2)
@pytest.mark.parametrize(
    ("family", "ways"), crossed(STAGES, [{}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}])
)
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_generates(family, ways):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"vocab_size": 40, "eos_token_id": 1, "pad_token_id": 1, **SETTINGS[family]}
    model = getattr(hf, KINDS[family])(getattr(hf, f"{family}Config")(**settings)).double().eval()
    ids = torch.randint(2, 40, (2, 5))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, **ways}
    expected = model.generate(ids, **options)
    pipeline.place(model, tulle.init(pipe=-1, timeout=8)["pipe"], STAGES[family])
    assert torch.equal(model.generate(ids, **options), expected)
