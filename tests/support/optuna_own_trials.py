"""Optuna's own tests of ``Trial``, run against ``ElasticTrial``: a plugin of pytest.

Whatever makes an ``optuna.Trial`` gets an elastic one instead, whose questions a real trial answers as in a sweep: the
same words on the wire, without processes and without a scheduler. Neither Optuna's wheel nor its sdist has the tests;
copy ``tests/trial_tests`` of its repository to a folder with another name than ``tests``, and run there::

    export PYTHONPATH=ELASTUNE:ELASTUNE/tests/support
    python -m pytest -p optuna_own_trials COPY/test_trial.py COPY/test_trials.py

with fakeredis and lupa beside Optuna, for its storage of Redis.
"""

from __future__ import annotations

import itertools
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest

import dist_core
from dist_core.state.states import StateRegistry
from dist_core.trial.plain_replica import Participant
from tuner_bridge.driving.exchange import Answers
from tuner_bridge.optuna.ahead import LookAhead
from tuner_bridge.optuna.trial import ElasticTrial
from tuner_bridge.optuna.trial_driver import Questions
from tuner_bridge.trackers.tracked_trial import TrackedTrial

RealTrial = optuna.trial.Trial
_ids = itertools.count()


class _Replica:
    """A replica that stands alone, with the driver at the other end of its line."""

    joined = is_outside = passes_do_not_count = False
    stands_alone = reports = True
    broken = None
    progress = 0.0

    def __init__(self, study: optuna.Study, real: optuna.Trial) -> None:
        self.environment = SimpleNamespace(replica_id=f"r{next(_ids)}")
        self.registry = StateRegistry()
        self.channel = self
        tracked = TrackedTrial((), study.study_name, "", real.number, {})
        self._ask = Questions(real, LookAhead(study), tracked, lambda values: None, threading.Lock())
        self._answers = Answers()

    @property
    def present(self) -> _Replica:
        return self

    def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        question = json.loads(json.dumps(body, allow_nan=False))
        return {"answer": json.loads(json.dumps(self._answers.to(question, self._ask)["answer"], allow_nan=False))}

    def raise_postponed(self) -> None: ...

    def leave_if_asked(self) -> None: ...


class OwnTrial(ElasticTrial):
    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        real = RealTrial(study, trial_id)
        replica = cast("Participant", _Replica(study, real))
        super().__init__(replica, real.number, trial_id)


def pytest_configure(config: pytest.Config) -> None:
    optuna.trial.Trial = OwnTrial  # type: ignore[misc]
    optuna.Trial = OwnTrial  # type: ignore[misc]
    # The scheduler's side of a report has tests of its own.
    dist_core.report = lambda *args, **options: None
