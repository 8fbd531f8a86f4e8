"""Modules and trainers of Lightning's as people write them, in a trial and outside of one."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanSquaredError

import dist_core
from dist_core.trial.current import get_core
from tests.support.habits import BATCH, Kit, examples, network, weights_of

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Recorded(Logger):
    """What a logger is told, on this process."""

    name, version = "recorded", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They are not compared."""


class Regression(pl.LightningModule):
    def __init__(self, *, by_step: bool = False, logs_steps: bool = True) -> None:
        super().__init__()
        self.by_step, self.logs_steps = by_step, logs_steps
        self.net = network()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=self.logs_steps, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        output = self.net(batch[0])
        self.error(output, batch[1])
        self.log("val_error", self.error)
        self.log("val_loss", nn.functional.mse_loss(output, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if self.by_step:
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Adversaries(pl.LightningModule):
    """Two optimizers in turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        x, y = batch
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        apart = (self.critic(self.generator(x).detach()) ** 2).mean() + ((self.critic(y) - 1) ** 2).mean()
        second.zero_grad()
        self.manual_backward(apart)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"generator": loss, "critic": apart})

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        )


class InTurns(Regression):
    """Two optimizers of the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[index % 2]
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01), torch.optim.SGD(self.parameters(), lr=0.05)


class Weighed(Regression):
    """Its loss is a mean over weights of the samples."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        weights = 1.0 + 4.0 * (x[:, :1] > 0)
        loader = dist_core.current_dataloader()
        if loader is not None:
            loader.weigh(float(weights.sum()))
        loss: torch.Tensor = (weights * (self.net(x) - y) ** 2).sum() / weights.sum()
        return loss


class Thawed(Regression):
    """The first layer trains from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 1)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(examples())


def a_loader(data: Dataset[Any], batch: int = BATCH, **options: Any) -> DataLoader[Any]:
    """The processes that torchrun starts have a batch each."""
    return DataLoader(data, batch // int(os.environ.get("WORLD_SIZE", "1")), **options)


def trainer_of(kit: Kit, folder: str, **options: Any) -> tuple[pl.Trainer, Recorded]:
    import dist_core.lightning  # noqa: F401  # it registers the strategy

    recorded = Recorded()
    chosen: dict[str, Any] = {
        "max_epochs": 3,
        "log_every_n_steps": 2,
        "strategy": "elastune" if kit.elastic else "auto",
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=recorded,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**chosen, **options},
    )
    return trainer, recorded


def told(trainer: pl.Trainer, recorded: Recorded, module: nn.Module) -> tuple[list[float], list[Any]]:
    """Weights and what every replica knows in the end; what the logger of this one was told."""
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    known = {
        name: float(value) for name, value in sorted(trainer.callback_metrics.items()) if not name.endswith("step")
    }
    rows = [(step, name, float(value)) for step, row in recorded.rows for name, value in sorted(row.items())]
    return [*weights_of(module), *rates, *known.values(), trainer.global_step, trainer.current_epoch], rows


def supervised(kit: Kit) -> Any:
    """Two batches a step, clipped; validated twice an epoch, the best kept, stopped when it gets no better."""
    with tempfile.TemporaryDirectory() as folder:
        stopping = EarlyStopping("val_loss", patience=20)
        keeping = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
        trainer, recorded = trainer_of(
            kit,
            folder,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            val_check_interval=0.5,
            callbacks=[stopping, keeping],
        )
        # Lightning logs the loss of a step's last batch, and a trial that of the step.
        module = Regression(logs_steps=False)
        trainer.fit(module, a_loader(examples(), BATCH // 2), DataLoader(examples(40), 16))
        numbers, rows = told(trainer, recorded, module)
        assert keeping.best_model_score is not None
        tested = trainer.validate(module, DataLoader(examples(40), 16), verbose=False)[0]["val_loss"]
        return [*numbers, float(keeping.best_model_score), float(stopping.wait_count), tested], rows


def at_precision(precision: str, kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, precision=precision, enable_checkpointing=False)
        module = Regression()
        trainer.fit(module, a_loader(examples()), DataLoader(examples(40), 16))
        return told(trainer, recorded, module)


def by_steps(kit: Kit) -> Any:
    """Ended by its steps, within an epoch; each of which takes a part of the data."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_epochs": -1, "max_steps": 8, "limit_train_batches": 3, "enable_checkpointing": False}
        trainer, recorded = trainer_of(kit, folder, **options)
        module = Regression(by_step=True)
        trainer.fit(module, a_loader(examples()))
        return told(trainer, recorded, module)


def by_hand(kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, enable_checkpointing=False)
        module = Adversaries()
        trainer.fit(module, a_loader(examples()))
        return told(trainer, recorded, module)


def of_a_kind(kind: type[Regression], kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, enable_checkpointing=False)
        module = kind()
        trainer.fit(module, a_loader(examples()))
        return told(trainer, recorded, module)


class Examples(pl.LightningDataModule):
    """Once on each machine its data is prepared; the last step has fewer samples than there may be replicas."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        with open(self.folder / "prepared", "a") as file:
            file.write("once\n")

    def setup(self, stage: str) -> None:
        assert (self.folder / "prepared").read_text() == "once\n"

    def train_dataloader(self) -> Any:
        return a_loader(examples(2 * BATCH + 1))

    def val_dataloader(self) -> Any:
        return DataLoader(examples(40), 16)


class LeftOut(Regression):
    """Of one epoch a hook leaves out the end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (2, 1) else None


def with_a_data_module(kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, max_epochs=5, enable_checkpointing=False)
        module = LeftOut()
        trainer.fit(module, datamodule=Examples(folder if not kit.elastic else _shared_folder(folder)))
        return told(trainer, recorded, module)


def _shared_folder(own: str) -> str:
    """That all replicas of a trial have."""
    environment = get_core().environment
    return own if environment is None else str(environment.checkpoint_dir)


class Watched(Regression):
    """With a metric object over training."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = MeanSquaredError()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.trained(self.net(batch[0]), batch[1])
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


def with_a_metric_object(kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, enable_checkpointing=False)
        module = Watched()
        trainer.fit(module, a_loader(examples()))
        return told(trainer, recorded, module)


def of_few_batches(kit: Kit) -> Any:
    """The end of each epoch is the user's, and others join at one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, limit_train_batches=2, max_epochs=6, enable_checkpointing=False)
        module = Regression()
        trainer.fit(module, a_loader(examples()), DataLoader(examples(40), 16))
        return told(trainer, recorded, module)


def of_a_stream(kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorded = trainer_of(kit, folder, enable_checkpointing=False)
        module = Regression()
        trainer.fit(module, a_loader(Streamed()), DataLoader(examples(40), 16))
        return told(trainer, recorded, module)


def half_trained(folder: str) -> None:
    """By the plain trainer, which has saved what it knows in the middle of its second epoch."""
    keeping = ModelCheckpoint(folder, filename="half", every_n_train_steps=6, save_top_k=-1)
    trainer, _ = trainer_of(Kit(elastic=False), folder, max_epochs=-1, max_steps=6, callbacks=[keeping])
    trainer.fit(Regression(), a_loader(examples()))


def gone_on(folder: str, kit: Kit) -> Any:
    with tempfile.TemporaryDirectory() as own:
        trainer, _ = trainer_of(kit, own, enable_checkpointing=False)
        module = Regression()
        trainer.fit(module, a_loader(examples()), ckpt_path=f"{folder}/half.ckpt" if kit.elastic else None)
        return weights_of(module), trainer.global_step


def saved(folder: str, kit: Kit) -> Any:
    """The trial's own files of Lightning's, at the end of each epoch."""
    keeping = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer, _ = trainer_of(kit, folder, callbacks=[keeping])
    trainer.fit(Regression(), a_loader(examples()), DataLoader(examples(40), 16))


def gone_on_plainly(folder: str) -> Any:
    trainer, _ = trainer_of(Kit(elastic=False), folder, enable_checkpointing=False)
    module = Regression()
    trainer.fit(module, a_loader(examples()), DataLoader(examples(40), 16), ckpt_path=f"{folder}/epoch=0.ckpt")
    return weights_of(module), trainer.global_step


def adaptive(kit: Kit) -> Any:
    """Large batches go past steps that something is due at."""
    from dist_core.lightning import ElasticStrategy

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"strategy": ElasticStrategy(batch="adaptive")} if kit.elastic else {}
        trainer, recorded = trainer_of(
            kit, folder, max_epochs=6, val_check_interval=25, log_every_n_steps=10, **options
        )
        module = Regression(by_step=True)
        trainer.fit(module, DataLoader(examples(400), 4, shuffle=True), DataLoader(examples(40), 16))
        validated = [step for step, row in recorded.rows if "val_loss" in row]
        logged = [step for step, row in recorded.rows if "train_loss_step" in row]
        core = get_core()
        return trainer.global_step, validated, logged, core.position.steps, float(trainer.callback_metrics["val_loss"])


def twice(kit: Kit) -> Any:
    """One trainer fits on some data, and then on other data."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = trainer_of(kit, folder, max_epochs=2, accumulate_grad_batches=2, enable_checkpointing=False)
        module = Regression(logs_steps=False)
        trainer.fit(module, a_loader(examples()), DataLoader(examples(40), 16))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, a_loader(examples(144)), DataLoader(examples(40), 16))
        return weights_of(module), trainer.accumulate_grad_batches
