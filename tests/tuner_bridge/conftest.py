from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest

from scheduler.client.connection import SchedulerClient
from scheduler.host.embedded import EmbeddedScheduler
from scheduler.policy import policy_by_name
from tests.support.nni_experiment import NniExperiment
from tests.support.nni_scripts import REPORTS
from tests.support.replicas_in_threads import ThreadLauncher
from tests.support.served import ServedLoop
from trials.store import TrialStore
from tuner_bridge.in_replica.run import run_in
from tuner_bridge.optuna.replica import prepare


@pytest.fixture(scope="session")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerClient]:
    embedded = EmbeddedScheduler(tmp_path_factory.mktemp("scheduler"), slots=2)
    client = embedded.start()
    yield client
    client.close()
    embedded.stop()


@pytest.fixture(scope="module")
def scheduler(_running: SchedulerClient) -> Iterator[SchedulerClient]:
    """One scheduler for all sweeps, joined through ELASTUNE_URL; nobody may end it."""
    with joined(_running):
        yield _running


@pytest.fixture(scope="module")
def scheduler_in_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerClient]:
    """The same, whose only slot runs the objectives of Optuna's trials in threads of this process."""
    launcher = ThreadLauncher(lambda core: run_in(core, prepare, (optuna.TrialPruned,)))
    folder = tmp_path_factory.mktemp("scheduler")
    served = ServedLoop(folder, TrialStore(), launcher, policy_by_name("goodput"))
    launcher.on_change = served.loop.wake
    client = served.client()
    with joined(client):
        yield client
    client.close()
    served.close()
    launcher.close()


@contextmanager
def joined(client: SchedulerClient) -> Iterator[None]:
    """Sweeps use this scheduler meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTUNE_URL", client.url)
        patch.setenv("ELASTUNE_TOKEN", client.token)
        yield


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Callable[..., NniExperiment]]:
    made: list[NniExperiment] = []

    def make(code: str = REPORTS, service: dict[str, Any] | None = None, **config: Any) -> NniExperiment:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(NniExperiment(folder, code, config, service or {}))
        return made[-1]

    yield make
    for each in made:
        each.close()
