"""Front ends: tuners keep their own words, each foreign one stops in its folder here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dist_core.version import __version__

if TYPE_CHECKING:
    from trials.terms import StudyTerms
    from tuner_bridge.in_replica.scripts import script
    from tuner_bridge.optuna import elastic, optimize
    from tuner_bridge.optuna.continuing import enqueue_from
    from tuner_bridge.optuna.current import current_trial, tell
    from tuner_bridge.optuna.metrics import report_metrics
    from tuner_bridge.optuna.population import Population
    from tuner_bridge.optuna.program import program
    from tuner_bridge.optuna.stages import stage
    from tuner_bridge.optuna.studies import elastune_studies

__all__ = [
    "Population",
    "StudyTerms",
    "__version__",
    "current_trial",
    "elastic",
    "elastune_studies",
    "enqueue_from",
    "optimize",
    "program",
    "report_metrics",
    "script",
    "stage",
    "tell",
]

_HOME = {
    "Population": "tuner_bridge.optuna.population",
    "StudyTerms": "trials.terms",
    "current_trial": "tuner_bridge.optuna.current",
    "elastic": "tuner_bridge.optuna.elastic",
    "elastune_studies": "tuner_bridge.optuna.studies",
    "enqueue_from": "tuner_bridge.optuna.continuing",
    "nni_training_service_info": "tuner_bridge.nni.training_service",
    "optimize": "tuner_bridge.optuna.optimize",
    "program": "tuner_bridge.optuna.program",
    "report_metrics": "tuner_bridge.optuna.metrics",
    "script": "tuner_bridge.in_replica.scripts",
    "stage": "tuner_bridge.optuna.stages",
    "tell": "tuner_bridge.optuna.current",
}


def __getattr__(name: str) -> Any:
    """Import each name when it is used: nobody needs another front end's packages, or waits for what it loads."""
    if name not in _HOME:
        raise AttributeError(f"module 'tuner_bridge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
