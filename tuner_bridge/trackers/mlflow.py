"""MLflow: a run a trial, to which the logging of its replicas goes as well."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tuner_bridge.trackers.base import REPORTED, TrackedRun, TrialIdentity, imported

_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "fail": "FAILED"}


class MLflow:
    """One MLflow run for each trial.

    ``tracking_uri``: default MLflow's own. ``experiment``: default the study's name.
    """

    name = "MLflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._uri = tracking_uri
        self._experiment = experiment

    def begin(self, trial: TrialIdentity) -> TrackedRun:
        library = imported("mlflow", "mlflow-skinny", self.name)
        uri = self._uri or library.get_tracking_uri()
        client = library.MlflowClient(uri)
        name = self._experiment or trial.study
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        return _Run(client, uri, experiment, trial)


class _Run:
    def __init__(self, client: Any, uri: str, experiment: str, trial: TrialIdentity) -> None:
        self._client = client
        tags = {"elastune.study": trial.study_key, "elastune.trial": str(trial.number)}
        self.identity = trial.kept or client.create_run(experiment, tags=tags, run_name=trial.name).info.run_id
        self.environ: Mapping[str, str] = {
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_EXPERIMENT_ID": experiment,
            "MLFLOW_RUN_ID": self.identity,
        }
        if trial.kept:
            client.update_run(self.identity, status="RUNNING")

    def parameter(self, name: str, value: Any) -> None:
        self._client.log_param(self.identity, name, value)

    def report(self, value: float, step: int) -> None:
        self._client.log_metric(self.identity, REPORTED, value, step=step)

    def measure(self, numbers: Mapping[str, float], seconds: float) -> None:
        now = int(time.time() * 1000)
        for name, value in numbers.items():
            self._client.log_metric(self.identity, f"elastune/{name}", value, timestamp=now, step=round(seconds))

    def leave(self) -> None:
        """Do nothing: all is written at once."""

    def end(self, state: str, values: Sequence[float] | None, history: Sequence[str]) -> None:
        for index, value in enumerate(values or ()):
            self._client.log_metric(self.identity, f"value_{index}" if index else "value", value)
        self._client.set_tag(self.identity, "elastune.history", "\n".join(history)[:5000])
        self._client.set_terminated(self.identity, _STATUS[state])
