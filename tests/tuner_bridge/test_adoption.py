"""What a dead driver left running is taken up again by Optuna's own loop, in every storage that outlives a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from scheduler.client.carriers import Answer, Carrier, NoAnswer, Request
from scheduler.client.connection import SchedulerClient
from scheduler.errors import RequestRefused, SchedulerUnreachable
from tuner_bridge.driving.template import TrialTemplate
from tuner_bridge.errors import SweepInterrupted
from tuner_bridge.optuna.trial_driver import TRIAL_ATTRIBUTE, OptunaDriver

optuna.logging.set_verbosity(optuna.logging.ERROR)

TEMPLATE = TrialTemplate(
    entrypoint="m:f",
    payload={},
    min_replicas=1,
    max_replicas=1,
    working_dir=".",
)


def storages(folder: Path) -> dict[str, Any]:
    return {
        "sqlite": f"sqlite:///{folder / 'study.db'}",
        "journal": optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
        "sqlite with heartbeat": optuna.storages.RDBStorage(
            f"sqlite:///{folder / 'beats.db'}", heartbeat_interval=60, grace_period=120
        ),
    }


def driver_of(study: optuna.Study) -> OptunaDriver:
    class Nobody(Carrier):
        def ask(self, request: Request) -> Answer:
            raise NoAnswer("nobody is there")

    client = SchedulerClient("http://127.0.0.1:9", "token", carrier=Nobody("http://127.0.0.1:9"))
    return OptunaDriver(study, client, TEMPLATE, reconnect=lambda client: client)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed to be used")
@pytest.mark.parametrize("kind", ["sqlite", "journal", "sqlite with heartbeat"])
def test_an_interrupted_trial_comes_back_with_its_number_and_parameters(tmp_path: Path, kind: str) -> None:
    storage = storages(tmp_path)[kind]
    study = optuna.create_study(study_name="s", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    finished = study.ask()
    study.tell(finished, 1.0)
    running = study.ask()
    value = running.suggest_float("x", 0.0, 1.0)
    running.report(0.5, 3)
    running.set_user_attr(TRIAL_ATTRIBUTE, "s/1")
    strangers = study.ask()
    again = optuna.load_study(study_name="s", storage=storage)
    driver = driver_of(again)
    assert driver.adopt_interrupted() == 1
    taken: list[tuple[int, float]] = []

    def objective(trial: optuna.Trial) -> float:
        taken.append((trial.number, trial.suggest_float("x", 0.0, 1.0)))
        return 0.0

    again.optimize(objective, n_trials=1)
    assert taken == [(running.number, value)]
    assert again.trials[running.number].intermediate_values == {3: 0.5}
    assert again.trials[strangers.number].state is optuna.trial.TrialState.RUNNING
    driver.client.close()


def test_a_trial_interrupted_before_it_was_submitted_can_be_adopted() -> None:
    study = optuna.create_study()
    driver = driver_of(study)
    driver.interrupt()
    driver.mark_next_trial()
    trial = study.ask()
    with pytest.raises(SweepInterrupted):
        driver.run(trial)
    assert TRIAL_ATTRIBUTE in study.trials[0].user_attrs
    assert driver.adopt_interrupted() == 1
    driver.client.close()


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_is_the_sweeps_own_before_it_runs(tmp_path: Path, kind: str) -> None:
    """A driver may be killed between any two of Optuna's writes."""
    grid = optuna.samplers.GridSampler({"x": [1.0, 2.0, 3.0]}, seed=1)
    study = optuna.create_study(study_name="s", storage=storages(tmp_path)[kind], sampler=grid)
    driver = driver_of(study)
    driver.mark_next_trial()
    driver.mark_next_trial()
    study.ask()
    assert driver.adopt_interrupted() == 1
    study.enqueue_trial({"x": 2.0})
    driver.mark_next_trial()
    assert [study.ask().number for _ in range(2)] == [0, 1]
    assert [TRIAL_ATTRIBUTE in trial.user_attrs for trial in study.trials] == [True, False]
    driver.mark_next_trial()
    assert study.ask().suggest_float("x", 0.0, 4.0) in (1.0, 2.0, 3.0)
    driver.client.close()


def test_studies_of_one_name_in_two_databases_are_told_apart(tmp_path: Path) -> None:
    keys = set()
    for number in range(2):
        study = optuna.create_study(study_name="same name/", storage=f"sqlite:///{tmp_path / str(number)}.db")
        driver = driver_of(study)
        keys.add(driver.study_key)
        again = driver_of(optuna.load_study(study_name="same name/", storage=f"sqlite:///{tmp_path / str(number)}.db"))
        assert again.study_key == driver.study_key
        assert driver.study_key.startswith("same-name-")
        for made in (driver, again):
            made.client.close()
    assert len(keys) == 2


def test_a_scheduler_that_dies_just_before_the_sweep_attaches_is_replaced() -> None:
    asked: list[str] = []

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        def request(self, method: str, path: str, body: Any = None) -> Any:
            asked.append(self.name)
            if self.name != "third":
                raise SchedulerUnreachable("on purpose")
            if method != "PUT":
                raise RequestRefused("the sweep is over")
            return {"slots": 3}

        def close(self) -> None:
            """Nothing is open."""

    names = iter(["second", "third"])
    driver = OptunaDriver(
        optuna.create_study(),
        Client("first"),  # type: ignore[arg-type]
        TEMPLATE,
        reconnect=lambda client: Client(next(names)),  # type: ignore[arg-type,return-value]
    )
    driver.attach()
    assert (driver.slots, asked[:3]) == (3, ["first", "second", "third"])
    driver.detach()


def test_a_driver_that_was_killed_here_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    dead = {"earlier"}
    monkeypatch.setattr("tuner_bridge.driving.study_driver.has_ended", dead.__contains__)

    class Client:
        def request(self, method: str, path: str, body: Any = None) -> Any:
            if path == "/studies":
                return [{"name": driver.study_key, "driver": "earlier"}, {"name": "other", "driver": "x"}]
            if method != "PUT":
                raise RequestRefused("the sweep is over")
            asked.append(body.get("takes_over"))
            if body.get("takes_over") != "earlier":
                raise RequestRefused("is being driven by another process")
            return {"slots": 3}

        def close(self) -> None:
            """Nothing is open."""

    def made() -> OptunaDriver:
        return OptunaDriver(optuna.create_study(), Client(), TEMPLATE, reconnect=lambda client: client)  # type: ignore[arg-type]

    driver = made()
    driver.attach()
    assert asked == [None, "earlier"]
    driver.detach()
    dead.clear()
    driver = made()
    with pytest.raises(RequestRefused, match="driven by another process"):
        driver.attach()
