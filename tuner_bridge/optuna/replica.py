"""Entry of a replica that runs an Optuna objective: a function, or a script that asks for its trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import optuna

from dist_core.errors import ControlChannelError, JoinAgain, PeerLost
from dist_core.hooks import listen_to_metrics
from dist_core.trial.plain_replica import Participant
from tuner_bridge.in_replica.run import run_replica
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.in_replica.shipped import ShippedCode, receive
from tuner_bridge.optuna.current import run_script, set_current_trial
from tuner_bridge.optuna.program import Program
from tuner_bridge.optuna.trainers import TrainerMetrics
from tuner_bridge.optuna.trial import ElasticTrial


def main() -> int:
    return run_replica(prepare, (optuna.TrialPruned,))


def prepare(replica: Participant, document: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the objective of the trial that the scheduler describes, with the trial that it is called with."""
    payload = document["payload"]
    trial = ElasticTrial(
        replica,
        document["number"],
        payload["storage_id"],
        promise_metric=payload.get("promise_metric"),
        prunes=payload.get("prunes", True),
    )
    if "script" in payload:
        script = Script.from_json(payload["script"])
        listen_to_metrics(TrainerMetrics(trial))
        return lambda: _reporting_all(trial, lambda: run_script(script, trial))
    if "program" in payload:
        program = Program.from_json(payload["program"])
        return lambda: _reporting_all(trial, lambda: program(trial))
    set_current_trial(trial)
    assert replica.channel is not None
    assert replica.environment is not None
    if "objective" in payload:
        listen_to_metrics(TrainerMetrics(trial))
    code = ShippedCode.from_json(payload.get("trainer") or payload["objective"])
    objective = receive(code, replica.channel, replica.environment)
    return lambda: _reporting_all(trial, lambda: objective(trial))


def _reporting_all(trial: ElasticTrial, run: Callable[[], Any]) -> Any:
    """Have the study hear what was reported before it hears how the trial ended."""
    try:
        value = run()
    except (PeerLost, ControlChannelError, JoinAgain):
        # It goes on.
        raise
    except Exception:
        with contextlib.suppress(Exception):
            trial.finish_reports()
        trial.close()
        raise
    trial.finish_reports()
    trial.close()
    return value
