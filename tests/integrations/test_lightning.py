"""`TulleStrategy` gives the numbers of a plain loop of one process, and keeps Lightning's own checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tulle
from rank_process import patches
from ranks import on_ranks

ROWS, EPOCHS, STEPS_PER_EPOCH, BATCH, CLIP, RATE = 30, 2, 2, 8, 0.3, 0.05


class Classifier(nn.Module):
    """A sparse table, if asked for, and layers."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=is_sparse)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(ids).mean(1)).tanh()).squeeze(1)


def built(seed: int, *, is_sparse: bool) -> nn.Module:
    torch.manual_seed(seed)
    return Classifier(is_sparse=is_sparse).double()


def optimizer_of(model: nn.Module, *, is_sparse: bool) -> Optimizer:
    return Adagrad(model.parameters(), RATE) if is_sparse else Adam(model.parameters(), RATE)


def schedule_of(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(ROWS, (STEPS_PER_EPOCH * BATCH, 6), generator=draw)
    return ids, torch.rand(len(ids), generator=draw, dtype=torch.float64)


def plain(*, is_sparse: bool) -> tuple[list[float], nn.Module, dict[str, Any]]:
    """A loop of one process: losses, the model, and the optimizer's state after an epoch."""
    model, losses, saved = built(0, is_sparse=is_sparse), [], {}
    optimizer = optimizer_of(model, is_sparse=is_sparse)
    schedule = schedule_of(optimizer)
    epoch = list(zip(*(part.split(BATCH) for part in samples()), strict=True))
    for step, (ids, target) in enumerate(EPOCHS * epoch, start=1):
        loss = nn.functional.mse_loss(model(ids), target)
        loss.backward()
        tulle.clip_grad_norm_(model, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == STEPS_PER_EPOCH:
            saved = copy.deepcopy(optimizer.state_dict())
    return losses, model, saved


def module_of(model: nn.Module, *, is_sparse: bool) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log("error", nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model, is_sparse=is_sparse)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
            }

    return Module()


def trainer_of(folder: Path, plan: object) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tulle.integrations.lightning import TulleStrategy

    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TulleStrategy(plan=plan),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,  # that of Lightning shuffles
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loader() -> DataLoader:
    dataset = TensorDataset(*samples())
    return DataLoader(dataset, batch_size=BATCH // 4, sampler=DistributedSampler(dataset, shuffle=False))


def check_weights(state: dict[str, Tensor], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[f"model.{name}"], value, rtol=1e-11, atol=1e-12)


def as_launched() -> None:
    """All that Lightning's own launcher tells a process."""
    launch = {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        patches.setenv(name, value)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("is_sparse", "plan"), [(True, "auto"), (True, "rows"), (False, "full_shard"), (False, "shard_optimizer")]
)
@on_ranks(2)
def test_lightning_gives_the_numbers_of_a_plain_loop_and_goes_on_from_what_it_saved(is_sparse, plan, tmp_path):
    as_launched()
    if plan in ("full_shard", "shard_optimizer"):
        plan = tulle.Plan({"data": 2}, memory=tulle.Memory(**{plan: True}))
    losses, expected, saved = plain(is_sparse=is_sparse)
    module = module_of(built(0, is_sparse=is_sparse), is_sparse=is_sparse)
    trainer = trainer_of(tmp_path, plan)
    trainer.fit(module, loader())
    shared = torch.tensor(module.losses, dtype=torch.float64)
    dist.all_reduce(shared)
    assert (shared.view(-1, 2).mean(1) / 2).tolist() == pytest.approx(losses, rel=1e-11)
    check_weights(torch.load(tmp_path / "epoch=1.ckpt")["state_dict"], expected)
    error = trainer.validate(module, loader(), verbose=False)[0]["error"]  # nothing is written over parts
    ids, target = samples()
    assert error == pytest.approx(nn.functional.mse_loss(expected(ids), target).item(), rel=1e-6)

    written = torch.load(tmp_path / "epoch=0.ckpt")
    optimizer_of(built(1, is_sparse=is_sparse), is_sparse=is_sparse).load_state_dict(written["optimizer_states"][0])
    torch.testing.assert_close(written["optimizer_states"][0]["state"], saved["state"], rtol=1e-11, atol=1e-12)
    resumed = module_of(built(1, is_sparse=is_sparse), is_sparse=is_sparse)
    trainer_of(tmp_path / "resumed", plan).fit(resumed, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert len(resumed.losses) == len(module.losses) // 2
    check_weights(torch.load(tmp_path / "resumed" / "epoch=1.ckpt")["state_dict"], expected)
    with pytest.raises(tulle.errors.ModelError, match=r"this Module was fitted before.*LearningRateFinder"):
        trainer_of(tmp_path / "again", plan).fit(resumed, loader())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("plan", ["auto", "full_shard"])
@on_ranks(2)
def test_an_average_of_wholes_is_refused_where_processes_have_parts(plan, tmp_path):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    as_launched()
    memory = tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=True))
    trainer = trainer_of(tmp_path, "auto" if plan == "auto" else memory)
    trainer.callbacks.append(StochasticWeightAveraging(0.1, swa_epoch_start=1))
    module = module_of(built(0, is_sparse=False), is_sparse=False)
    if plan == "auto":
        trainer.fit(module, loader())
        return
    with pytest.raises(tulle.errors.ModelError, match=r"StochasticWeightAveraging averages whole .* a part of 'model"):
        trainer.fit(module, loader())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("plan", ["auto", "full_shard"])
@on_ranks(2)
def test_what_a_callback_unfreezes_later_is_kept_in_step(plan, tmp_path):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
            self.freeze(pl_module.model.hidden)

        def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.hidden, optimizer, lr=RATE)

    as_launched()
    model, expected = built(0, is_sparse=False), built(0, is_sparse=False)
    module = module_of(model, is_sparse=False)
    module.configure_optimizers = lambda: SGD([p for p in model.parameters() if p.requires_grad], RATE)
    memory = tulle.Plan({"data": 2}, memory=tulle.Memory(full_shard=True))
    trainer = trainer_of(tmp_path, "auto" if plan == "auto" else memory)
    trainer.callbacks.append(Unfreezing())
    trainer.fit(module, loader())

    expected.hidden.requires_grad_(False)
    optimizer = SGD(expected.parameters(), RATE)
    for epoch in range(EPOCHS):
        expected.hidden.requires_grad_(epoch == 1)
        for ids, target in zip(*(part.split(BATCH) for part in samples()), strict=True):
            nn.functional.mse_loss(expected(ids), target).backward()
            tulle.clip_grad_norm_(expected, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    check_weights(torch.load(tmp_path / "epoch=1.ckpt")["state_dict"], expected)
