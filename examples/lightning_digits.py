"""Tune a LightningModule that recognises digits: the trainer gets one more argument, and the study another call.

    python examples/lightning_digits.py [--trials 8] [--slots 2]

Without Elastune the trainer has no ``strategy``, and the last line says ``study.optimize(objective, n_trials=8)``.
Validations reach the pruner without a word here: the study minimises, and the module logs a loss.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import dist_core.lightning  # noqa: F401  # it knows the strategy's name
from tuner_bridge import optimize

EPOCHS, BATCH = 8, 64


class Digits(pl.LightningModule):
    def __init__(self, learning_rate: float, channels: int, dropout: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 16, 10),
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def data() -> list[Any]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    return random_split(whole, [1437, 360], generator=torch.Generator().manual_seed(0))


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(0, verbose=False)
    module = Digits(
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 3e-2, log=True),
        channels=trial.suggest_categorical("channels", [8, 16, 32]),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
    )
    train, held_out = data()
    trainer = pl.Trainer(
        strategy="elastune",
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.fit(module, DataLoader(train, BATCH, shuffle=True), DataLoader(held_out, 360))
    trial.set_user_attr("accuracy", float(trainer.callback_metrics["val_accuracy"]))
    return float(trainer.callback_metrics["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(2))
    optimize(study, objective, n_trials=arguments.trials, n_jobs=arguments.slots, slots=arguments.slots)
    best = study.best_trial
    print(f"best: loss {best.value:.4f} (accuracy {best.user_attrs['accuracy']:.3f}) with {best.params}")


if __name__ == "__main__":
    main()
