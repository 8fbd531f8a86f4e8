"""Tune a text classifier with Hugging Face's Trainer: a small model made from a configuration, nothing is downloaded.

    python examples/text_classification.py [--trials 8] [--slots 2]

Without Elastune this is ``Trainer(...).hyperparameter_search(space, n_trials=8)``: here the trainer's class has another
name, and ``search`` is given the function that makes it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

from dist_core.huggingface import ElasticTrainer as Trainer
from tuner_bridge.huggingface import search

WORDS, LENGTH = 200, 24
library: Any = transformers


class Reviews(Dataset[Any]):
    """Texts of random words. A text is good if more of its words are of the first hundred."""

    def __init__(self, count: int, seed: int) -> None:
        self.words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": (words < WORDS // 2).float().mean().gt(0.5).long()}


def model_init() -> Any:
    torch.manual_seed(0)
    return library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
    )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make() -> Any:
    arguments = library.TrainingArguments(
        tempfile.mkdtemp(prefix="reviews-"),
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        args=arguments,
        model_init=model_init,
        train_dataset=Reviews(2000, seed=0),
        eval_dataset=Reviews(400, seed=1),
        compute_metrics=accuracy,
    )


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [16, 32, 64]),
    }


def objective(metrics: Mapping[str, float]) -> float:
    return metrics["eval_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    best: Any = search(
        make,
        space,
        compute_objective=objective,
        direction="maximize",
        n_trials=given.trials,
        n_jobs=2,
        slots=given.slots,
        live=True,
    )
    print(f"best: accuracy {best.objective:.3f} with {best.hyperparameters}")


if __name__ == "__main__":
    main()
