"""Step time of the elastic Trainer against Hugging Face's own, which trains by DDP: one replica and two Gloo ranks.

Both train the same small BERT on the same data in the same processes, run after run in turns. A run's figure is the
median time between the ends of two of its steps, behind the first few; the row's is the median of the paired ratios.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.frame import Measurement
from benchmarks.paired_runs import rows_of

RUNS = 9
STEPS = 60
FIRST = 20
BATCH = 16
LENGTH = 64


class Sentences(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.words = torch.randint(5, 500, (count, LENGTH))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        mask = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": self.words[index], "attention_mask": mask, "labels": self.words[index, 0] % 2}


def _step_seconds(trainer_class: Any, folder: str, data: Sentences) -> float:
    import transformers

    library: Any = transformers
    ends: list[float] = []

    class Clock(library.TrainerCallback):  # type: ignore[misc]  # its annotations are narrower than what it takes
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    torch.manual_seed(0)
    model = library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=500,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            num_labels=2,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = library.TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer_class(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    laps = [after - before for before, after in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)]
    return statistics.median(laps)


def _times(rank: int, world_size: int) -> dict[str, list[float]]:
    import transformers
    from accelerate.state import AcceleratorState

    from dist_core.huggingface import ElasticTrainer
    from dist_core.trial.current import reset_core

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    data = Sentences(BATCH * world_size * (STEPS + 1))
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    library: Any = transformers
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS):
            for name, trainer_class in (("plain", library.Trainer), ("ours", ElasticTrainer)):
                AcceleratorState._reset_state(reset_partial_state=True)
                reset_core()
                torch.distributed.barrier()
                times[name].append(_step_seconds(trainer_class, folder, data))
    return times


def measure() -> list[Measurement]:
    return rows_of(_times, what="ElasticTrainer", peer="transformers.Trainer")
