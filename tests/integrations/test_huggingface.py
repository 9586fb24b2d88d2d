"""`TulleTrainer` gives the numbers of a plain loop of one process, saves what Trainer saves, and goes on from it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tulle
from rank_process import patches
from ranks import on_ranks

STEPS, SAVED, BATCH, CLIP, RATE = 5, 2, 8, 0.3, 0.05
ROWS = 30
DETERMINATE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


class Classifier(nn.Module):
    """A sparse table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.out(self.words(input_ids).mean(1)).squeeze(1) - labels).pow(2).mean()}


def classifier() -> nn.Module:
    return Classifier().double()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": ROWS, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **DETERMINATE)).double()
    model.loss_type = "ForCausalLM"  # else Trainer counts a target for the first word too, on one process as well
    return model


def samples_of(make) -> list[dict[str, Tensor]]:
    """Of the language model with unlike numbers of targets, by which Trainer weighs them over all processes."""
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(ROWS, (6,), generator=draw) for _ in range(STEPS * BATCH)]
    if make is classifier:
        return [{"input_ids": one, "labels": one[0].double() / ROWS} for one in ids]
    masked = [torch.where(torch.arange(6) < 3 + number % 4, one, -100) for number, one in enumerate(ids)]
    return [{"input_ids": one, "labels": labels} for one, labels in zip(ids, masked, strict=True)]


def built(make, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def optimizer_of(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), RATE) if isinstance(model, Classifier) else AdamW(model.parameters(), RATE)


def plain(make) -> tuple[list[float], list[float], nn.Module, dict[str, Any]]:
    """A loop of one process: losses, norms, the model, and the optimizer's state when it was saved."""
    model = built(make, 0)
    optimizer, samples, losses, norms, saved = optimizer_of(model), samples_of(make), [], [], {}
    schedule = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for step in range(STEPS):
        batch = samples[step * BATCH : (step + 1) * BATCH]
        loss = model(**{name: torch.stack([one[name] for one in batch]) for name in batch[0]})["loss"]
        loss.backward()
        norms.append(tulle.clip_grad_norm_(model, CLIP).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED:
            saved = copy.deepcopy(optimizer.state_dict())
    return losses, norms, model, saved


def trainer_of(make, model: nn.Module, folder: Path, **arguments: Any):
    from transformers import TrainingArguments

    from tulle.integrations.huggingface import TulleTrainer

    given = TrainingArguments(
        output_dir=str(folder),
        use_cpu=arguments.pop("use_cpu", True),
        per_device_train_batch_size=BATCH // 4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_grad_norm=CLIP,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        **{name: value for name, value in arguments.items() if name not in ("plan", "mesh")},
    )
    ours = {name: value for name, value in arguments.items() if name in ("plan", "mesh")}
    samples = samples_of(make)
    return TulleTrainer(model, given, train_dataset=samples, optimizers=(optimizer_of(model), None), **ours)


def as_launched() -> None:
    """What Accelerate knows a launched process by; it keeps what it has found out for the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launch = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        patches.setenv(name, value)
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def check_weights(model: nn.Module, expected: nn.Module) -> None:
    for name, value in tulle.full_state_dict(model, everywhere=True).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("make", "plan"), [(classifier, "auto"), (classifier, "rows"), (gpt2, "full_shard")])
@on_ranks(2)
def test_trainer_gives_the_numbers_of_a_plain_loop_and_goes_on_from_what_it_saved(make, plan, tmp_path):
    as_launched()
    if plan == "full_shard":
        plan = tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=True))
    losses, norms, expected, saved = plain(make)
    trainer = trainer_of(make, built(make, 0), tmp_path, plan=plan)
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-6)  # Trainer adds them up in float32
    assert [line["grad_norm"] for line in logged] == pytest.approx(norms, rel=1e-9)
    check_weights(trainer.model, expected)

    folder = tmp_path / f"checkpoint-{SAVED}"
    written = torch.load(folder / "optimizer.pt")
    optimizer_of(built(make, 1)).load_state_dict(written)  # a plain one takes it
    torch.testing.assert_close(written["state"], saved["state"], rtol=1e-11, atol=1e-12)
    as_launched()
    resumed = trainer_of(make, built(make, 1), tmp_path, plan=plan)
    resumed.train(resume_from_checkpoint=str(folder))
    check_weights(resumed.model, expected)
    evaluated = trainer.evaluate(samples_of(make)[:BATCH])["eval_loss"]
    batch = samples_of(make)[:BATCH]
    whole = expected(**{name: torch.stack([one[name] for one in batch]) for name in batch[0]})["loss"].item()
    assert make is gpt2 or evaluated == pytest.approx(whole, rel=1e-6)  # of targets Trainer weighs batches alike
    if make is gpt2:
        last = type(expected).from_pretrained(tmp_path / f"checkpoint-{STEPS}", dtype=torch.float64)
        check_weights(last, expected)


@pytest.mark.parametrize("plan", ["rows", "full_shard"])
@on_ranks(2)
def test_processes_with_parts_may_generate_texts_of_unlike_lengths(plan, tmp_path):
    from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from tulle.integrations.huggingface import TulleTrainer

    class Translating(TulleTrainer, Seq2SeqTrainer):
        pass

    as_launched()
    sizes = {"vocab_size": ROWS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
    heads = {"decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = BartConfig(
        **sizes, **heads, max_position_embeddings=16, tie_word_embeddings=False, forced_eos_token_id=None
    )
    model, plain_model = BartForConditionalGeneration(config), BartForConditionalGeneration(config)
    tables = [name for name, _ in model.named_parameters() if "embed_tokens" in name or "shared" in name]
    plans = {
        "rows": dict.fromkeys(tables, "rows"),
        "full_shard": tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=True)),
    }
    batches = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 1}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    given = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True, **batches, **quiet)
    ids = torch.randint(3, ROWS, (4, 5), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": one, "labels": one} for one in ids]
    trainer = Translating(model, given, train_dataset=samples, plan=plans[plan])
    trainer.train()
    plain_model.load_state_dict(tulle.full_state_dict(trainer.model, everywhere=True))

    lengths = [3, 8]
    found = trainer.predict(samples, max_new_tokens=lengths[dist.get_rank()], min_new_tokens=2).predictions
    for rank, length in enumerate(lengths):
        theirs = plain_model.eval().generate(ids[2 * rank :][:2], max_new_tokens=length, min_new_tokens=2)
        assert found[2 * rank :][:2, : theirs.shape[1]].tolist() == theirs.tolist()


@on_ranks(2)
def test_what_trainer_would_drop_or_deal_wrongly_is_refused_by_name(tmp_path):
    as_launched()
    with pytest.raises(tulle.errors.MeshError, match=r"1 processes .*has 2: .* give TrainingArguments use_cpu"):
        trainer_of(classifier, classifier(), tmp_path, use_cpu=False)
    as_launched()
    with pytest.raises(tulle.errors.MeshError, match="only axis 'data' can have several processes, not 'model'"):
        trainer_of(classifier, classifier(), tmp_path, mesh=tulle.init(model=2))
    with pytest.raises(tulle.errors.PlanError, match=r"torch_compile=True, .*: call model.compile"):
        trainer_of(classifier, classifier(), tmp_path, torch_compile=True)
    with pytest.raises(tulle.errors.PlanError, match=r"ddp_bucket_cap_mb=5, .*: give TulleTrainer plan=tulle.Plan"):
        trainer_of(classifier, classifier(), tmp_path, ddp_bucket_cap_mb=5)


@on_ranks(2)
def test_mixed_precision_trains_under_full_sharding_as_without(tmp_path):
    """Accelerate sets a forward on the model for it."""
    weights = []
    for full_shard in (False, True):
        as_launched()
        plan = tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=full_shard))
        model = built(gpt2, 0).float()
        trainer = trainer_of(gpt2, model, tmp_path / str(full_shard), plan=plan, bf16=True, save_strategy="no")
        trainer.train()
        weights.append(tulle.full_state_dict(model, everywhere=True))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
