"""Models as others wrote them, in sizes at which a step takes a core 5 to 300 ms, with random weights and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, SAMPLES = 4096, 64, 4
WIDTH, LAYERS, HEADS = 192, 4, 4
CLASSES, PIXELS = 10, 64


@dataclass(frozen=True)
class Job:
    """What is trained.

    Args:
        model: As its author's code makes it.
        loss: Of the model, or of what wraps it, on a batch.
        batch: The batch of a rank.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, or plain SGD where a table has sparse gradients."""
        if any(getattr(module, "sparse", False) for module in self.model.modules()):
            return torch.optim.SGD(self.model.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)


def words(rank: int, *, count: int = WORDS, shape: tuple[int, ...] = (SAMPLES, LENGTH)) -> Tensor:
    """Numbers of words, uniform; the first few are none (padding and the like)."""
    return torch.randint(3, count, shape, generator=torch.Generator().manual_seed(rank))


def pictures(rank: int, *, samples: int = SAMPLES) -> Tensor:
    """`[samples, 3, PIXELS, PIXELS]`, normal."""
    return torch.randn(samples, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(rank))


def _text(rank: int) -> dict[str, Tensor]:
    return {"input_ids": words(rank), "labels": words(rank)}


def _labeled_text(rank: int) -> dict[str, Tensor]:
    return {"input_ids": words(rank), "labels": torch.arange(SAMPLES) % 2}


def _pairs(rank: int) -> dict[str, Tensor]:
    return {"input_ids": words(rank), "labels": words(100 + rank)}


def _labeled_pictures(rank: int) -> dict[str, Tensor]:
    return {"pixel_values": pictures(rank), "labels": torch.arange(SAMPLES) % 2}


def _of_transformers(name: str, config: str, batch: Callable[[int], Any], sizes: Mapping[str, Any]) -> Job:
    """A model of transformers that gives its loss, without dropout, and without a cache of keys and values."""
    given = getattr(transformers, config)(**{"vocab_size": WORDS, **sizes})
    given.use_cache = False
    for rate in _DROPOUTS:
        if hasattr(given, rate):
            setattr(given, rate, 0.0)
    return Job(getattr(transformers, name)(given), _own_loss, batch)


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch).loss


_DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout",
    "dropout_rate",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
)
_USUAL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
_GROUPED = {**_USUAL, "num_key_value_heads": 2}
_HEADED = {**_GROUPED, "head_dim": WIDTH // HEADS}
_GPT = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 2 * LENGTH}
_BART = {
    "d_model": WIDTH,
    **{f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in (
        ("layers", 3), ("attention_heads", HEADS), ("ffn_dim", 2 * WIDTH)
    )},
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {"d_model": WIDTH, "d_ff": 2 * WIDTH, "num_heads": HEADS, "d_kv": WIDTH // HEADS, "decoder_start_token_id": 0}
_TRANSFORMERS: dict[str, tuple[str, Callable[[int], Any], Mapping[str, Any]]] = {
    "AlbertForMaskedLM": ("AlbertConfig", _text, {**_USUAL, "embedding_size": WIDTH // 2}),
    "BartForConditionalGeneration": ("BartConfig", _pairs, _BART),
    "BertForMaskedLM": ("BertConfig", _text, _USUAL),
    "BloomForCausalLM": ("BloomConfig", _text, {"n_layer": LAYERS, "hidden_size": WIDTH, "n_head": HEADS}),
    "ConvNextForImageClassification": (
        "ConvNextConfig", _labeled_pictures, {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 128, 192]}
    ),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config", _text, {**_USUAL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "DistilBertForMaskedLM": (
        "DistilBertConfig", _text, {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 2 * WIDTH}
    ),
    "ElectraForMaskedLM": ("ElectraConfig", _text, {**_USUAL, "embedding_size": WIDTH // 2}),
    "FalconForCausalLM": ("FalconConfig", _text, _USUAL),
    "FunnelForMaskedLM": (
        "FunnelConfig", _text,
        {"block_sizes": [2, 2], "d_model": WIDTH, "n_head": HEADS, "d_head": WIDTH // HEADS, "d_inner": 2 * WIDTH},
    ),
    "GPT2LMHeadModel": ("GPT2Config", _text, _GPT),
    "GPTJForCausalLM": ("GPTJConfig", _text, {**_GPT, "rotary_dim": 16}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _text, _USUAL),
    "Gemma2ForCausalLM": ("Gemma2Config", _text, _HEADED),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _text, _HEADED),
    "GptOssForCausalLM": ("GptOssConfig", _text, {**_HEADED, "num_local_experts": 4}),
    "GraniteForCausalLM": ("GraniteConfig", _text, _GROUPED),
    "LlamaForCausalLM": ("LlamaConfig", _text, _GROUPED),
    "MPNetForMaskedLM": ("MPNetConfig", _text, _USUAL),
    "MambaForCausalLM": ("MambaConfig", _text, {"hidden_size": WIDTH, "num_hidden_layers": 2}),
    "MarianMTModel": ("MarianConfig", _pairs, _BART),
    "MistralForCausalLM": ("MistralConfig", _text, _GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", _text, {**_GROUPED, "num_local_experts": 4}),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", _labeled_pictures, {"image_size": PIXELS}),
    "ModernBertForMaskedLM": (
        "ModernBertConfig", _text,
        {**_USUAL, "pad_token_id": 0, **dict.fromkeys(("cls_token_id", "bos_token_id"), 1),
         **dict.fromkeys(("sep_token_id", "eos_token_id"), 2)},
    ),
    "OPTForCausalLM": (
        "OPTConfig", _text,
        {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "ffn_dim": 2 * WIDTH, "num_attention_heads": HEADS,
         "word_embed_proj_dim": WIDTH},
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", _text, _USUAL),
    "Phi3ForCausalLM": ("Phi3Config", _text, {**_GROUPED, "pad_token_id": 0}),
    "Qwen2ForCausalLM": ("Qwen2Config", _text, _GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", _text, _HEADED),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig", _text,
        {**_HEADED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH // 2},
    ),
    "ResNetForImageClassification": (
        "ResNetConfig", _labeled_pictures,
        {"depths": [1, 1, 1, 1], "hidden_sizes": [64, 128, 256, 256], "embedding_size": 32},
    ),
    "RobertaForSequenceClassification": ("RobertaConfig", _labeled_text, _USUAL),
    "SwinForImageClassification": (
        "SwinConfig", _labeled_pictures,
        {"image_size": PIXELS, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 4},
    ),
    "SwitchTransformersForConditionalGeneration": (
        "SwitchTransformersConfig", _pairs, {**_T5, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 4}
    ),
    "T5ForConditionalGeneration": ("T5Config", _pairs, {**_T5, "num_layers": 3, "num_decoder_layers": 3}),
    "ViTForImageClassification": (
        "ViTConfig", _labeled_pictures, {**_USUAL, "image_size": PIXELS, "patch_size": 8}
    ),
    "XLNetLMHeadModel": (
        "XLNetConfig", _text, {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 2 * WIDTH}
    ),
}  # fmt: skip


class WordModel(nn.Module):
    """A language model of two LSTM layers; gives the mean loss of the words that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        scores = self.output(self.cells(self.table(text))[0])
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), text[:, 1:].flatten())


class SmallBlock(nn.Module):
    """A residual block of two layers of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class UNet(nn.Module):
    """Three levels, with what goes down given to what goes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 16), self._block(16, 32), self._block(32, 64)])
        self.up = nn.ModuleList([self._block(96, 32), self._block(48, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        layers = [(nn.Conv2d(n, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()) for n in (before, after)]
        return nn.Sequential(*layers[0], *layers[1])

    def forward(self, x: Tensor) -> Tensor:
        kept = [x := self.down[0](x)]
        for level in (1, 2):
            kept.append(x := self.down[level](functional.max_pool2d(x, 2)))
        for level, block in enumerate(self.up):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept[1 - level]], 1))
        return self.out(x)


class Collaborative(nn.Module):
    """Neural collaborative filtering: users, items and a perceptron over both."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100_000, 32, sparse=sparse), nn.Embedding(50_000, 32, sparse=sparse)
        self.score = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.score(torch.cat([self.users(users), self.items(items)], -1)).square().mean()


class Clicks(nn.Module):
    """DLRM, small: eight tables of bags, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 32, sparse=True, mode="sum") for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(36 + 32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:  # [samples, 13], [samples, tables, ids]
        own = self.bottom(numbers)
        found = torch.stack([own, *(table(ids[:, place]) for place, table in enumerate(self.tables))], 1)
        first, second = torch.triu_indices(9, 9, 1)
        pairs = (found @ found.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([own, pairs], 1)).square().mean()


class SkipGram(nn.Module):
    """word2vec: two tables with sparse gradients, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Embedding(50_000, 100, sparse=True) for _ in range(2))

    def forward(self, centers: Tensor, others: Tensor) -> Tensor:
        return functional.softplus(-(self.inner(centers)[:, None] * self.outer(others)).sum(-1)).mean()


def _called(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch)


def _classified(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch), torch.arange(len(batch)) % CLASSES)


def _perceptron() -> Job:
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return Job(nn.Sequential(*layers, nn.Linear(512, CLASSES)), _classified, lambda _: torch.randn(256, 512))


def _small_blocks() -> Job:
    blocks = [SmallBlock() for _ in range(100)]
    return Job(nn.Sequential(*blocks, nn.Linear(32, CLASSES)), _classified, lambda _: torch.randn(64, 32))


def _unet() -> Job:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch).square().mean()

    return Job(UNet(), loss, partial(pictures, samples=2))


def _collaborative(*, sparse: bool) -> Job:
    def batch(rank: int) -> tuple[Tensor, ...]:
        return words(rank, count=100_000, shape=(1024,)), words(rank, count=50_000, shape=(1024,))

    return Job(Collaborative(sparse=sparse), _called, batch)


def _clicks() -> Job:
    def batch(rank: int) -> tuple[Tensor, ...]:
        return torch.randn(512, 13), words(rank, count=20_000, shape=(512, 8, 3))

    return Job(Clicks(), _called, batch)


def _skip_gram() -> Job:
    def batch(rank: int) -> tuple[Tensor, ...]:
        return words(rank, count=50_000, shape=(1024,)), words(rank, count=50_000, shape=(1024, 6))

    return Job(SkipGram(), _called, batch)


MODELS: dict[str, Callable[[], Job]] = {
    **{name: partial(_of_transformers, name, *about) for name, about in _TRANSFORMERS.items()},
    "LSTM": lambda: Job(WordModel(), _called, lambda rank: (words(rank),)),
    "perceptron of 7 layers": _perceptron,
    "100 blocks of 32 x 32": _small_blocks,
    "U-Net": _unet,
    "collaborative filtering": partial(_collaborative, sparse=False),
    "the same, sparse gradients": partial(_collaborative, sparse=True),
    "DLRM, 8 tables, sparse": _clicks,
    "skip-gram, sparse": _skip_gram,
}
"""By name; what is not of transformers is written here."""
