"""The driver of an NNI experiment between a manager and a scheduler that a test plays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.waiting import until
from trials.spec import TrialSpec
from tuner_bridge.driving.exchange import ToldParameters
from tuner_bridge.errors import SweepInterrupted
from tuner_bridge.nni.experiment_driver import ExperimentDriver


class Channel:
    """A scheduler that knows the trials of an earlier manager."""

    def request(self, method: str, path: str) -> Any:
        if path == "/trials":
            return [
                {"study": "nni-e", "trial_id": "t1", "number": 0},
                {"study": "other", "trial_id": "t2", "number": 7},
            ]
        assert path == "/trials/t1"
        return {"spec": {"payload": {"nni": {"trial": "AAAAA"}}}}


class Driver:
    """A driver whose trials end when the test says so."""

    slots = 4
    study_key = "nni-e"
    interrupted = False

    def __init__(self) -> None:
        self.parameters = ToldParameters()
        self.client = Channel()
        self.specs: list[TrialSpec] = []
        self.cancelled: list[tuple[str, str]] = []
        self.asks: list[Callable[[str, dict[str, Any]], Any]] = []
        self.watches: list[Callable[[Mapping[str, Any]], None]] = []
        self.submits = threading.Event()
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.ended: Mapping[str, Any] | BaseException = SweepInterrupted()
        self.may_end = threading.Event()

    def run_trial(self, spec: TrialSpec, ask: Any, watch: Any, submitted: Callable[[str], None]) -> Mapping[str, Any]:
        self.specs.append(spec)
        self.asks.append(ask)
        self.watches.append(watch)
        self.submits.set()
        self.may_submit.wait(5.0)
        submitted(f"id-{spec.number}")
        assert self.may_end.wait(5.0)
        if isinstance(self.ended, BaseException):
            raise self.ended
        return self.ended

    def cancel_for_sure(self, trial_id: str, why: str) -> None:
        self.cancelled.append((trial_id, why))

    def interrupt(self) -> None:
        self.interrupted = True
        self.may_end.set()


class Bench:
    def __init__(self, folder: Path, **experiment: Any) -> None:
        self.said: list[Mapping[str, Any]] = []
        self.driver = Driver()
        self.experiment = {
            "experiment": "e",
            "direction": "minimize",
            "command": f"{sys.executable} train.py",
            "code_dir": str(folder),
            "trials_dir": str(folder / "trials"),
            "min_replicas": 1,
            **experiment,
        }
        self.served = ExperimentDriver(self.experiment, self.driver, self.said.append)  # type: ignore[arg-type]  # a stand-in

    def submit(self, name: str, sequence: int = 0) -> None:
        self.driver.submits.clear()
        self.served.handle({"submit": {"trial": name, "sequence": sequence, "parameter": "{}"}})
        assert self.driver.submits.wait(5.0)

    def until_said(self) -> None:
        self.until(lambda: bool(self.said))

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, 5.0)

    def end(self, ended: Mapping[str, Any] | BaseException) -> None:
        self.driver.ended = ended
        self.driver.may_end.set()
        for thread in self.served._threads:
            thread.join(5.0)
