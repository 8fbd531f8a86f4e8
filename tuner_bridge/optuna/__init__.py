"""Optuna's front end. ``optimize`` is ``study.optimize`` with elastic trials."""

from tuner_bridge.optuna.elastic import elastic
from tuner_bridge.optuna.optimize import optimize

__all__ = ["TorchDistributedTrial", "current_trial", "elastic", "optimize", "report_metrics", "tell"]


def __getattr__(name: str) -> object:
    # What replicas use needs torch, which a driver does without.
    if name in ("current_trial", "tell"):
        from tuner_bridge.optuna import current

        return getattr(current, name)
    if name == "TorchDistributedTrial":
        from tuner_bridge.optuna.torch_distributed import TorchDistributedTrial

        return TorchDistributedTrial
    if name == "report_metrics":
        from tuner_bridge.optuna.metrics import report_metrics

        return report_metrics
    raise AttributeError(f"module 'tuner_bridge.optuna' has no attribute {name!r}")
