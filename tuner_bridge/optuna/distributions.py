"""Suggestions by distribution, through the public methods of whatever trial there is."""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution


def suggest(trial: Any, name: str, distribution: BaseDistribution) -> Any:
    """Draw a parameter from its distribution; raises what the trial raises."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    draw = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return draw(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
