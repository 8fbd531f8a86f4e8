"""Trial of a training script: ``current_trial`` and ``tell``.

In a replica that is the sweep's trial. A script that is started by itself gets one of its own, to be debugged with:
parameters are drawn at random, or taken from ``ELASTUNE_PARAMS``, and what it reports is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import BaseTrial

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.optuna.trial import ElasticTrial

_NOTHING = object()


class _Current:
    trial: BaseTrial | None = None
    value: Any = _NOTHING


def current_trial() -> BaseTrial:
    """Return the trial that this script runs for; the same object at every call."""
    if _Current.trial is None:
        _Current.trial = _trial_of_ones_own()
    return _Current.trial


def tell(value: Any) -> None:
    """Set the value of the script's trial. If the script never calls this, its last reported value counts.

    Args:
        value: The value; for several objectives, a sequence.
    """
    _Current.value = value
    if not isinstance(_Current.trial, ElasticTrial):
        print(f"value: {value}", file=sys.stderr)


def set_current_trial(trial: ElasticTrial) -> None:
    _Current.trial, _Current.value = trial, _NOTHING


def run_script(script: Script, trial: ElasticTrial) -> Any:
    """Run the script for a trial and return its value; None on replicas that do not report."""
    set_current_trial(trial)
    script.run()
    if not trial.speaks:
        return None
    if _Current.value is not _NOTHING:
        return _Current.value
    reported = trial.last_report()
    if reported is None:
        raise InvalidSweep(
            "the script ended without a value; call tuner_bridge.tell(value), or report with "
            "tuner_bridge.current_trial().report(value, step)"
        )
    return reported


class _TrialOfOnesOwn(optuna.Trial):
    def report(self, value: float, step: int) -> None:
        super().report(value, step)
        print(f"report: step {step}: {value}", file=sys.stderr)

    def report_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        print(f"metrics: step {step}: {dict(metrics)}", file=sys.stderr)

    def should_prune(self) -> bool:
        return False


def _trial_of_ones_own() -> BaseTrial:
    if "ELASTUNE_API" in os.environ:
        raise InvalidSweep(
            "current_trial() was called before this replica had its trial, while a module was imported; call it in the "
            "script or the objective itself"
        )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(), pruner=optuna.pruners.NopPruner())
    given = os.environ.get("ELASTUNE_PARAMS")
    if given is not None:
        study.enqueue_trial(_parameters(given))
    return _TrialOfOnesOwn(study, study.ask()._trial_id)


def _parameters(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidSweep(f"ELASTUNE_PARAMS is {text!r:.200}; it must be a JSON object such as '{{\"lr\": 0.1}}'")
    return document


def TorchDistributedTrial(trial: BaseTrial | None = None, group: Any = None, device: Any = None) -> BaseTrial:  # noqa: N802
    """Return the trial that every replica has already; ``group`` and ``device`` are not needed.

    Numbers arrive as the sampler drew them, in 64 bits, and an exception reaches all replicas. The loop in which the
    ranks above 0 call the objective with None goes away: every replica runs the objective.
    """
    return trial if isinstance(trial, ElasticTrial) else current_trial()
