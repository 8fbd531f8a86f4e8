"""Step time of Lightning's trainer with the elastic strategy against its own: one replica and two Gloo ranks.

Both train the same transformer on the same data in the same processes, run after run in turns. A run's figure is the
median time between the ends of two of its steps, behind the first few; the row's is the median of the paired ratios.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.frame import Measurement
from benchmarks.paired_runs import rows_of

RUNS = 9
STEPS = 60
FIRST = 20
BATCH = 16
LENGTH, WIDTH = 64, 128


def _step_seconds(strategy: str, processes: int, folder: str, data: TensorDataset) -> float:
    import lightning.pytorch as pl

    ends: list[float] = []

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Encoder(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.words = nn.Embedding(500, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, 4)
            self.head = nn.Linear(WIDTH, 2)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.head(self.encoder(self.words(batch[0])).mean(1)), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = pl.Trainer(
        strategy=strategy,
        devices=processes,
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Clock()],
    )
    trainer.fit(Encoder(), DataLoader(data, BATCH))
    laps = [after - before for before, after in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)]
    return statistics.median(laps)


def _times(rank: int, world_size: int) -> dict[str, list[float]]:
    import dist_core.lightning  # noqa: F401  # it registers the strategy
    from dist_core.trial.current import reset_core

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # As under torchrun, whose processes Lightning takes as they are.
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
    words = torch.randint(0, 500, (BATCH * world_size * (STEPS + 1), LENGTH))
    data = TensorDataset(words, words[:, 0] % 2)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS):
            for name, strategy in (("plain", "ddp" if world_size > 1 else "auto"), ("ours", "elastune")):
                reset_core()
                torch.distributed.barrier()
                times[name].append(_step_seconds(strategy, world_size, folder, data))
    return times


def measure() -> list[Measurement]:
    return rows_of(_times, what="Lightning, elastic", peer="its own trainer")
