"""What tests train with Hugging Face's Trainer: a tiny classifier, its data and its arguments."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset


class Tokens(Dataset[Any]):
    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        self.words = torch.randint(5, 50, (count, 8), generator=generator)
        self.words[:, 1] = self.labels + 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return {
            "input_ids": self.words[index],
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": self.labels[index],
        }


def arguments(folder: str, **options: Any) -> Any:
    import transformers

    library: Any = transformers
    # Of torchrun's processes each has a batch of its own.
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    size = options.pop("batch_size", 24)
    defaults = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": size // processes,
        "per_device_eval_batch_size": 4 // processes,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
        "train_sampling_strategy": "sequential",
        "seed": 0,
    }
    return library.TrainingArguments(folder, **{**defaults, **options})


def classifier() -> Any:
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    return library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=2,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def accuracy(prediction: Any) -> dict[str, float]:
    assert len(prediction.predictions) == len(prediction.label_ids)
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def told(trainer: Any) -> list[Any]:
    """What the trainer has logged, without times."""
    kept = ("train_loss", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "step")
    return [value for entry in trainer.state.log_history for name in kept if (value := entry.get(name)) is not None]
