"""The promise of tensor parallelism for models of `transformers`: loss, gradients and parameters of one process."""

import copy

import pytest
import torch
from split_training import check_exact, ids, numbers, split, square
from torch.overrides import TorchFunctionMode

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError
from tulle.memory import recompute

WORDS = 50
COMMON = {"hidden_size": 48, "num_attention_heads": 12, "vocab_size": WORDS}
LLAMA = COMMON | {
    "num_hidden_layers": 2,
    "intermediate_size": 36,
    "use_cache": False,
    "num_key_value_heads": 12,
    "head_dim": 4,
}
BERT = COMMON | {
    "num_hidden_layers": 2,
    "intermediate_size": 36,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 12,
    "vocab_size": WORDS,
    "n_positions": 32,
    "use_cache": False,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
T5 = {
    "num_layers": 2,
    "d_model": 48,
    "d_ff": 36,
    "num_heads": 12,
    "d_kv": 4,
    "vocab_size": WORDS,
    "dropout_rate": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
DISTANCES = {"relative_attention": True, "max_relative_positions": 16, "pos_att_type": ["p2c", "c2p"]}
LATENT = LLAMA | {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 36,
    "experts_implementation": "eager",
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 36, "experts_implementation": "eager"}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False}),
    "gpt2 eager": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"attn_implementation": "eager"}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5 gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama grouped": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_key_value_heads": 6, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        LLAMA | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1},
    ),
    "nemotron": (  # experts without a gate
        "NemotronHForCausalLM",
        "NemotronHConfig",
        LLAMA | EXPERTS | {"n_routed_experts": 4, "layers_block_type": ["moe"] * 2},
    ),
    "gpt oss": (  # gate and up lie in turns, and have biases
        "GptOssForCausalLM",
        "GptOssConfig",
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager", "head_dim": 4},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        LLAMA | {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 36},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", COMMON | {"num_hidden_layers": 2}),
    "openai gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT2 | {"afn": "gelu"}),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "deberta": ("DebertaForMaskedLM", "DebertaConfig", BERT | DISTANCES),
    "deberta v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", BERT | DISTANCES | {"position_buckets": 8}),
    "deberta v3": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        BERT | DISTANCES | {"position_buckets": 8, "share_att_key": True, "conv_kernel_size": 3},
    ),
    "deepseek v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT | {"q_lora_rank": None}),
    "deepseek v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", BERT | {"embedding_size": 48}),
    "phi": ("PhiForCausalLM", "PhiConfig", LLAMA | {"resid_pdrop": 0.0, "partial_rotary_factor": 1.0}),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        COMMON | {"num_hidden_layers": 2, "ffn_dim": 36, "word_embed_proj_dim": 48, "dropout": 0.0},
    ),
    "bart": (
        "BartForCausalLM",
        "BartConfig",
        {"d_model": 48, "decoder_layers": 2, "decoder_ffn_dim": 36, "decoder_attention_heads": 12, "vocab_size": WORDS},
    ),
}


class Float64Throughout(TorchFunctionMode):
    """Models of `transformers` go through float32 in norms, routers and losses: here through float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        return function(*wide, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})


def build(name: str, **changes):
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(options | changes))
    return getattr(transformers, model_class)(config).double().train()


def loss(model, step):
    words = ids(2, 12, seed=step, words=WORDS)
    mask = torch.ones_like(words)
    mask[1, -3:] = 0
    with Float64Throughout():
        return model(input_ids=words, attention_mask=mask, labels=words).loss


def skip_uneven(name: str) -> None:
    if name == "llama grouped" and tulle.init(model=-1).size == 4:
        pytest.skip("6 heads of keys and values are not for 4 ranks")


LIKE_OTHERS = {"gpt2 untied", "roberta", "t5 gated", "mistral", "qwen2", "gemma", "mt5", "deberta v2", "opt"}
"""Of which another model goes the same way, and more."""


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MODELS]
)
def test_models_of_transformers_are_split(name):
    check_exact(build(name), loss)


@on_ranks(2)
@pytest.mark.parametrize("name", ["electra", "phi", "neox", "opt", "umt5"])
def test_blocks_of_classes_that_are_not_registered_are_split_by_what_their_code_shows(name):
    model = build(name)
    tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0)
    columns, rows = split(model)
    ours = 10 if name == "umt5" else 4  # two of each block, and three of a decoder's
    assert len(rows) == ours
    assert len(columns) == {"neox": 4, "umt5": 26}.get(name, 8)


@on_ranks(2)
@pytest.mark.parametrize(("name", "queries"), [("deepseek v2", "q_proj"), ("deepseek v3", "q_b_proj")])
def test_of_latent_attention_the_heads_are_split_and_the_latents_are_whole(name, queries):
    model = build(name)
    tensor_parallel.apply(model, tulle.init(model=-1)["model"], smallest_bytes=0)
    attention, (columns, rows) = model.model.layers[0].self_attn, split(model)
    within = {one.rpartition(".")[2] for one in (*columns, *rows) if one.startswith("model.layers.0.self_attn")}
    assert within == {queries, "kv_b_proj", "o_proj"}
    assert attention.kv_b_proj.weight.shape == (6 * (6 + 8), 16)
    assert attention.kv_a_proj_with_mqa.weight.shape == (16 + 4, 48)


@pytest.mark.slow
@on_ranks(3, 4)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_split_over_more_ranks(name):
    skip_uneven(name)
    check_exact(build(name), loss)


@on_ranks(2)
def test_experts_whose_gate_and_up_lie_in_turns_are_cut_between_them():
    axis, model = tulle.init(model=-1)["model"], build("gpt oss")
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    experts = model.model.layers[0].mlp.experts
    assert [(name, *part.shape) for name, part in experts.named_parameters()] == [
        ("gate_up_proj", 4, 48, 36),
        ("gate_up_proj_bias", 4, 36),
        ("down_proj", 4, 18, 48),
        ("down_proj_bias", 4, 48),  # which the first rank alone adds
    ]
    with pytest.raises(ModelError, match="experts of 35 inner features, whose gate and up lie in turns"):
        tensor_parallel.apply(build("gpt oss", intermediate_size=35), axis, smallest_bytes=0)


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama grouped", "qwen3", "mixtral"])
def test_models_of_transformers_are_split_along_sequences(name):
    check_exact(build(name), loss, sequence=True)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("pairs", [1, 2])
def test_fewer_heads_of_keys_and_values_than_ranks_are_shared(pairs):
    axis = tulle.init(model=-1)["model"]
    model = build("llama", num_key_value_heads=pairs, attention_bias=True)
    if axis.size % pairs and pairs % axis.size:
        with pytest.raises(ModelError, match="2 heads of keys and values for 12"):
            tensor_parallel.apply(copy.deepcopy(model), axis, select=["model.layers.*"])
    check_exact(model, loss)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "gpt2 untied"])
def test_the_loss_of_split_scores_is_that_of_whole_ones(name):
    select = {"model.layers.*": "auto", "transformer.h.*": "auto", "lm_head": "vocabulary"}
    model = build(name)
    select = {p: move for p, move in select.items() if p.split(".")[0] in dict(model.named_children())}
    check_exact(model, loss, select=select)


class Wrapped(torch.nn.Module):
    """A language model within another, as adapters and heads of the user's own have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama")

    def forward(self, **batch):
        return self.inner(**batch)


@on_ranks(2)
def test_the_loss_of_split_scores_is_found_within_another_model():
    check_exact(Wrapped(), loss, select={"inner.lm_head": "vocabulary"})


class Biased(torch.nn.Module):
    """A model whose mask is trained."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.bias = build(name), torch.nn.Parameter(numbers(1, 1, 5, 5, seed=1))

    def forward(self, step):
        words = ids(2, 5, seed=step, words=WORDS)
        return square(self.model(input_ids=words, labels=words, attention_mask=self.bias.expand(2, 1, 5, 5)).logits)


def loss_of_biased(model, step):
    return model(step)


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2 eager", "bert", "t5", "llama"])
def test_a_mask_that_is_trained_has_the_gradient_of_all_heads(name):
    check_exact(Biased(name), loss_of_biased)


@on_ranks(2)
def test_the_check_holds_a_model_against_one_device():
    """In float32, with the kernels for experts that transformers chooses there."""
    axis = tulle.init(model=-1)["model"]
    model = build("mixtral", experts_implementation="grouped_mm", intermediate_size=32).float()
    tensor_parallel.apply(model, axis, sample={"input_ids": ids(2, 8, seed=0, words=WORDS)}, check=True)


@on_ranks(2)
def test_attention_with_dropout_leaves_ranks_in_step():
    axis = tulle.init(model=-1)["model"]
    for name, changes in {
        "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3},
        "bert": {"attention_probs_dropout_prob": 0.3},
        "t5": {"dropout_rate": 0.3},
        "llama": {"attention_dropout": 0.3},
        "deepseek v3": {"attention_dropout": 0.3},
        "deberta v3": {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.3},
    }.items():
        model = tensor_parallel.apply(build(name, **changes), axis, smallest_bytes=0)
        torch.manual_seed(2)
        found = loss(model, 0)
        heard = tulle.comm.gather_values((found.item(), torch.get_rng_state().tolist()), axis, label="test")
        assert heard[0] == heard[1], name


@on_ranks(2)
def test_half_of_a_stack_that_shares_position_biases_is_refused():
    axis = tulle.init(model=-1)["model"]
    with pytest.raises(ModelError, match="encoder shares a table of position biases among its 2 layers, of which 1"):
        tensor_parallel.apply(build("t5"), axis, select=["encoder.block.0"])


@on_ranks(2)
def test_a_head_tied_to_a_table_that_is_split_is_refused():
    axis = tulle.init(model=-1)["model"]
    with pytest.raises(ModelError, match="weight is tied to a parameter that was split"):
        tensor_parallel.apply(build("gpt2"), axis, select=["transformer.wte"])


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradient_checkpointing_of_transformers_gives_the_same(name):
    model = build(name)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    check_exact(model, loss)


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "deepseek v3"])
def test_words_are_generated_with_a_cache_as_on_one_device(name):
    axis = tulle.init(model=-1)["model"]
    model = build(name, use_cache=True).eval()
    model.generation_config.eos_token_id = None
    prompt = {"input_ids": ids(2, 5, seed=0, words=WORDS), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**prompt, **options)
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    assert torch.equal(model.generate(**prompt, **options), expected)


@on_ranks(2)
def test_recomputed_attention_draws_the_same_numbers_again():
    axis = tulle.init(model=-1)["model"]
    gradients = []
    for is_recomputed in (False, True, True):
        model = tensor_parallel.apply(build("gpt2", attn_pdrop=0.3, resid_pdrop=0.3), axis, smallest_bytes=0)
        if is_recomputed:
            recompute(model, ["transformer.h.0", "transformer.h.1"])
        torch.manual_seed(3)
        for step in range(2):
            loss(model, step).backward()
        gradients.append(([p.grad for p in model.parameters()], torch.get_rng_state()))
    for found, state in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0][0], strict=True))
        assert torch.equal(state, gradients[0][1])
