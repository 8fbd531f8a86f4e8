"""Optuna's front end. ``optimize`` is ``study.optimize`` with elastic trials."""

import importlib
from typing import Any

from tuner_bridge.optuna.elastic import elastic
from tuner_bridge.optuna.optimize import optimize

__all__ = ["TorchDistributedTrial", "current_trial", "elastic", "optimize", "report_metrics", "tell"]

_HOME = {
    "TorchDistributedTrial": "current",
    "current_trial": "current",
    "report_metrics": "metrics",
    "tell": "current",
}


def __getattr__(name: str) -> Any:
    # What replicas use needs torch, which a driver does without.
    if name not in _HOME:
        raise AttributeError(f"module 'tuner_bridge.optuna' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tuner_bridge.optuna.{_HOME[name]}"), name)
