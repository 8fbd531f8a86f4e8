"""Trials that continue others: the best of a sweep, trained on from the state that they ended with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.population import MORE_EPOCHS, PARENT


def enqueue_from(
    study: optuna.Study, top: int = 1, params: Mapping[str, Any] = MappingProxyType({}), *, more_epochs: int = 0
) -> list[int]:
    """Queue trials that begin with the state of the study's best ones, for the next ``optimize``.

    Args:
        study: one whose trials ran with ``optimize(..., keep_states=True)``, on the same scheduler or ``state_dir``.
        top: how many of its best complete trials are continued.
        params: parameters that change; the others stay their parent's. A parameter that changes the model's shape is
            refused when its trial begins, by the name of the first tensor that differs.
        more_epochs: epochs to train beyond those that the code asks for with ``remaining_epochs_until``. Trainers of
            Lightning and Hugging Face refuse it: their epochs are a setting of their own.

    Returns:
        The numbers of the trials that are continued, best first.

    Raises:
        InvalidSweep: for a parameter that no trial has, or where too few trials are complete.
    """
    if len(study.directions) > 1:
        raise InvalidSweep("enqueue_from needs a best trial; this study has several objectives")
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not 1 <= top <= len(complete):
        rule = f"choose 1 to {len(complete)}" if complete else "run trials first"
        raise InvalidSweep(f"top is {top}, and the study has {len(complete)} complete trials; {rule}")
    known = {name for trial in complete for name in trial.params}
    unknown = sorted(set(params) - known)
    if unknown:
        raise InvalidSweep(f"no trial has a parameter {unknown[0]!r}; they have {', '.join(sorted(known))}")
    if not isinstance(more_epochs, int) or more_epochs < 0:
        raise InvalidSweep(f"more_epochs is {more_epochs!r}; it must be a whole number of at least 0")
    maximizes = study.direction is StudyDirection.MAXIMIZE
    best = sorted(complete, key=lambda trial: trial.value or 0.0, reverse=maximizes)[:top]
    for trial in best:
        attributes = {PARENT: trial.number}
        if more_epochs:
            attributes[MORE_EPOCHS] = trial.user_attrs.get(MORE_EPOCHS, 0) + more_epochs
        study.enqueue_trial({**trial.params, **params}, user_attrs=attributes)
    return [trial.number for trial in best]
