"""Front ends: tuners keep their own words, each foreign one stops in its folder here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_core.hooks import loaded_on_use
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
    "Population": ".optuna.population",
    "StudyTerms": "trials.terms",
    "current_trial": ".optuna.current",
    "elastic": ".optuna.elastic",
    "elastune_studies": ".optuna.studies",
    "enqueue_from": ".optuna.continuing",
    "nni_training_service_info": ".nni.training_service",
    "optimize": ".optuna.optimize",
    "program": ".optuna.program",
    "report_metrics": ".optuna.metrics",
    "script": ".in_replica.scripts",
    "stage": ".optuna.stages",
    "tell": ".optuna.current",
}


# Nobody needs another front end's packages, or waits for what it loads.
__getattr__ = loaded_on_use(__name__, _HOME)
