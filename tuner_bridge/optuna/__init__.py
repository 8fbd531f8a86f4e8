"""Optuna's front end. ``optimize`` is ``study.optimize`` with elastic trials."""

from dist_core.hooks import loaded_on_use
from tuner_bridge.optuna.elastic import elastic
from tuner_bridge.optuna.optimize import optimize

__all__ = ["TorchDistributedTrial", "current_trial", "elastic", "optimize", "report_metrics", "tell"]

_HOME = {
    "TorchDistributedTrial": ".current",
    "current_trial": ".current",
    "report_metrics": ".metrics",
    "tell": ".current",
}


# What replicas use needs torch, which a driver does without.
__getattr__ = loaded_on_use(__name__, _HOME)
