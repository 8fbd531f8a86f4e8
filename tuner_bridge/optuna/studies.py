"""``elastune_studies``: the sweeps that a library starts by itself, as elastic trials without a change of its code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna

from tuner_bridge.optuna.elastic import ElasticObjective
from tuner_bridge.optuna.optimize import optimize
from tuner_bridge.optuna.trial_driver import OptunaDriver

_OWN = ("optuna", "tuner_bridge")

logger = logging.getLogger(__name__)


@contextmanager
def elastune_studies(**options: Any) -> Iterator[None]:
    """Let ``study.optimize(...)`` be ``tuner_bridge.optimize(study, ...)`` within the block, whoever calls it.

    For libraries that make a study and optimize it themselves::

        with elastune_studies(max_replicas=8):
            library.tune(...)

    Trials that a library runs in its own process, between ``study.ask()`` and ``study.tell()``, stay there: that is
    said once.

    Args:
        options: those of ``optimize`` beyond ``study.optimize``'s own, for each of these sweeps.
    """
    plain_optimize, plain_ask = optuna.Study.optimize, optuna.Study.ask
    has_warned = False

    def elastic_optimize(study: optuna.Study, func: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(func, "__self__", None), OptunaDriver) or isinstance(func, ElasticObjective):
            # Of a sweep that is elastic already.
            plain_optimize(study, func, *args, **kwargs)
        else:
            optimize(study, func, *args, **{**options, **kwargs})

    def noticed_ask(study: optuna.Study, *args: Any, **kwargs: Any) -> optuna.Trial:
        nonlocal has_warned
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not has_warned and caller.partition(".")[0] not in _OWN:
            has_warned = True
            logger.warning(
                "%s asks study %r for trials and runs them in this process, so they are not elastic. For elastic "
                "trials, pass a function to study.optimize",
                caller,
                study.study_name,
            )
        return plain_ask(study, *args, **kwargs)

    study: Any = optuna.Study
    study.optimize, study.ask = elastic_optimize, noticed_ask
    try:
        yield
    finally:
        study.optimize, study.ask = plain_optimize, plain_ask
