"""WeightsAndBiases: a run a trial, online or offline; the runs of a study are a group."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tuner_bridge.trackers.base import REPORTED, TrackedRun, TrialIdentity, imported


class WeightsAndBiases:
    """One run of Weights & Biases for each trial.

    ``mode``: "offline" writes to ``folder`` what ``wandb sync`` sends later. ``settings`` go to ``wandb.init``.
    """

    name = "W&B"

    def __init__(
        self,
        project: str,
        *,
        mode: Literal["online", "offline"] | None = None,
        folder: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        self._project = project
        self._mode = mode
        self._folder = None if folder is None else Path(folder).absolute()
        self._settings = settings

    def begin(self, trial: TrialIdentity) -> TrackedRun:
        library = imported("wandb", "wandb", self.name)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        identity = trial.kept or re.sub(r"[^A-Za-z0-9_-]", "-", f"{trial.study_key}-{trial.number}")[-64:]
        run = library.init(
            project=self._project,
            name=trial.name,
            group=trial.study,
            id=identity,
            resume="allow",
            mode=self._mode,
            dir=self._folder,
            # Trials of one process are several runs at a time.
            reinit="create_new",
            settings=library.Settings(console="off", silent=True, x_disable_stats=True),
            **self._settings,
        )
        run.define_metric(REPORTED, step_metric="step")
        run.define_metric("elastune/*", step_metric="elastune/seconds")
        return _Run(run, identity, {"WANDB_PROJECT": self._project, "WANDB_RUN_GROUP": trial.study})


class _Run:
    def __init__(self, run: Any, identity: str, environ: Mapping[str, str]) -> None:
        self._run = run
        self.identity = identity
        self.environ = environ

    def parameter(self, name: str, value: Any) -> None:
        self._run.config.update({name: value}, allow_val_change=True)

    def report(self, value: float, step: int) -> None:
        self._run.log({REPORTED: value, "step": step})

    def measure(self, numbers: Mapping[str, float], seconds: float) -> None:
        self._run.log({**{f"elastune/{name}": value for name, value in numbers.items()}, "elastune/seconds": seconds})

    def leave(self) -> None:
        self._run.finish()

    def end(self, state: str, values: Sequence[float] | None, history: Sequence[str]) -> None:
        for index, value in enumerate(values or ()):
            self._run.summary[f"value_{index}" if index else "value"] = value
        self._run.summary["elastune/state"] = state
        self._run.summary["elastune/history"] = "\n".join(history)
        self._run.finish(exit_code=int(state == "fail"))
