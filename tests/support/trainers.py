"""What a search over a trainer of Hugging Face's is given: functions at the top level of a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tests.support.hugging_face import Tokens, accuracy, arguments, classifier


def make() -> Any:
    from dist_core.huggingface import ElasticTrainer

    folder = os.environ["TRAINER_FOLDER"]
    return ElasticTrainer(
        args=arguments(folder, num_train_epochs=4, eval_strategy="epoch", save_strategy="no"),
        model_init=classifier,
        train_dataset=Tokens(96),
        eval_dataset=Tokens(41, seed=1),
        compute_metrics=accuracy,
    )


def make_plain() -> Any:
    import transformers

    library: Any = transformers
    return library.Trainer(
        args=arguments(os.environ["TRAINER_FOLDER"]), model_init=classifier, train_dataset=Tokens(96)
    )


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)}


def misspelt(trial: Any) -> dict[str, Any]:
    return {"learning_rat": trial.suggest_float("learning_rat", 1e-3, 3e-2)}


def value(metrics: Mapping[str, float]) -> float:
    return metrics["eval_loss"]


def objective(trial: Any) -> float:
    """As people write it without ``search``: the trainer's evaluations are reported for it."""
    trainer = make()
    trainer.args.learning_rate = trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)
    trainer.args.metric_for_best_model = "accuracy"
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


def space_noting_home(trial: Any) -> dict[str, Any]:
    """Where its library keeps what it downloads."""
    import huggingface_hub.constants

    trial.set_user_attr("home", huggingface_hub.constants.HF_HOME)
    return space(trial)
