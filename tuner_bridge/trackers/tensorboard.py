"""TensorBoard: a folder of event files a trial, which ``tensorboard --logdir`` shows side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner_bridge.trackers.base import REPORTED, TrackedRun, TrialIdentity, imported


class TensorBoard:
    """One folder of TensorBoard's event files for each trial.

    ``folder``: where the trials' folders are made.
    """

    name = "TensorBoard"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()

    def begin(self, trial: TrialIdentity) -> TrackedRun:
        library = imported("tensorboardX", "tensorboardX", self.name)
        return _Run(library, str(self._folder / trial.name))


class _Run:
    environ: Mapping[str, str] = {}

    def __init__(self, library: Any, folder: str) -> None:
        self.identity = folder
        self._writer = library.SummaryWriter(folder)
        self._parameters: dict[str, Any] = {}

    def parameter(self, name: str, value: Any) -> None:
        self._parameters[name] = value if isinstance(value, (bool, int, float, str)) else str(value)

    def report(self, value: float, step: int) -> None:
        self._writer.add_scalar(REPORTED, value, step)

    def measure(self, numbers: Mapping[str, float], seconds: float) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"elastune/{name}", value, round(seconds), walltime=time.time())
        self._writer.flush()

    def leave(self) -> None:
        self._writer.close()

    def end(self, state: str, values: Sequence[float] | None, history: Sequence[str]) -> None:
        results = {f"value_{index}" if index else "value": value for index, value in enumerate(values or ())}
        if self._parameters and results:
            # By its own file: the writer's add_hparams makes another one, which shows as another run.
            for summary in imported("tensorboardX.summary", "tensorboardX", TensorBoard.name).hparams(
                self._parameters, results
            ):
                self._writer.file_writer.add_summary(summary)
            for name, value in results.items():
                self._writer.add_scalar(name, value)
        self._writer.add_text("elastune/history", "\n".join(f"- {line}" for line in (*history, f"ended: {state}")))
        self._writer.close()
