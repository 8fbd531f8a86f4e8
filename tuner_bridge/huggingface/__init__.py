"""A search over Hugging Face's trainers, as ``Trainer.hyperparameter_search`` does one."""

from tuner_bridge.optuna.trainer_search import search

__all__ = ["search"]
