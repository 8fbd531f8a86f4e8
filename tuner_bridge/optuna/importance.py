"""Importance of each parameter, as Optuna tells it, for trials of any front end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

LOG_FROM = 50.0
"""Positive numbers whose largest is so many times their smallest are taken to have been drawn by their logarithm."""


def importance(ended: Sequence[tuple[Mapping[str, Any], float]], direction: str) -> dict[str, float]:
    """Parts of 1 by name, the largest first; of the parameters that all trials have.

    Raises ValueError where there is none to be told. PED-ANOVA (Watanabe et al., IJCAI 2023), which needs no further
    library and takes hundreds of trials in a few milliseconds.
    """
    names = set.intersection(*(set(parameters) for parameters, _ in ended)) if ended else set()
    distributions = {}
    for name in sorted(names):
        found = _distribution([parameters[name] for parameters, _ in ended])
        if found is not None:
            distributions[name] = found
    if not distributions:
        raise ValueError(
            "importance needs a parameter that all finished trials have, with two different values at least; wait "
            "for more trials"
        )
    study = optuna.create_study(direction="maximize" if direction == "maximize" else "minimize")
    for parameters, value in ended:
        params = {name: _as(distributions[name], parameters[name]) for name in distributions}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        parts = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: round(part, 6) for name, part in parts.items() if math.isfinite(part)}


def _as(distribution: BaseDistribution, value: Any) -> Any:
    return str(value) if isinstance(distribution, CategoricalDistribution) else value


def _distribution(values: Sequence[Any]) -> BaseDistribution | None:
    """Return the distribution that the values may have come from; None where they are all alike."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        low, high = min(values), max(values)
        if low == high:
            return None
        log = low > 0 and high / low >= LOG_FROM
        if all(isinstance(value, int) for value in values):
            return IntDistribution(low, high, log=log)
        return FloatDistribution(low, high, log=log)
    choices = sorted({str(value) for value in values})
    return CategoricalDistribution(choices) if len(choices) > 1 else None
