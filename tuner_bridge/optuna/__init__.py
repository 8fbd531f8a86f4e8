"""Optuna's front end. ``optimize`` is ``study.optimize`` with elastic trials."""

from tuner_bridge.optuna.optimize import optimize

__all__ = ["optimize"]
