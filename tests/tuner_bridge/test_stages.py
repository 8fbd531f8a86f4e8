"""Stage trees: trials that differ only in what happens from an epoch on train the epochs before it once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution

from tests.support import objectives
from tuner_bridge import Population, optimize, stage
from tuner_bridge.errors import InvalidSweep, SweepInterrupted
from tuner_bridge.optuna.ahead import suggest
from tuner_bridge.optuna.population import PARENT
from tuner_bridge.optuna.stages import SHARED_EPOCHS, Branch, StageTree, declared_stages

EARLY, LATE = CategoricalDistribution([1, 2, 3]), CategoricalDistribution([0, 10, 20])


class Sweep:
    """A study's trials and the tree that they form."""

    def __init__(self, stages: dict[str, int]) -> None:
        self.study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        self.is_over = threading.Event()
        self.tree = StageTree(stages, self.is_over.is_set)

    def ask(self, **parameters: Any) -> optuna.Trial:
        self.study.enqueue_trial(parameters)
        return self.study.ask()

    def branch(self, trial: optuna.Trial) -> Branch:
        def draw(name: str, space: BaseDistribution) -> Any:
            return suggest(trial, name, space)

        branch = self.tree.branch(trial, draw)
        self.tree.note_submitted(trial.number, f"t{trial.number}")
        return branch

    def waits(self, trial: optuna.Trial) -> bool:
        """True if it does not begin before another one has come further; the sweep is over then."""
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(self.branch, trial)
            time.sleep(0.05)
            waits = not begun.done()
            self.is_over.set()
            if waits:
                with pytest.raises(SweepInterrupted):
                    begun.result(10)
        self.is_over.clear()
        return waits

    def trains(self, trial: optuna.Trial, epoch: int = 0) -> None:
        self.tree.note_live(trial.number, {"state": "running", "epoch": epoch})


def test_trials_alike_before_a_stage_begin_where_the_first_of_them_stood() -> None:
    sweep = Sweep({"late": 5})
    first = sweep.ask(early=1, late=0)
    assert sweep.branch(first) == Branch(keep_after=(5,))
    assert sweep.waits(sweep.ask(early=1, late=10)), "nobody knows yet what the first one asks for"
    suggest(first, "early", EARLY)
    sweep.trains(first, 4)
    second = sweep.ask(early=1, late=10)
    assert sweep.waits(second), "the first one trains the epochs of both"
    third = sweep.ask(early=2, late=10)
    assert sweep.branch(third) == Branch(keep_after=(5,)), "another trunk begins at once"
    suggest(first, "late", LATE)
    sweep.trains(first, 5)
    assert sweep.branch(second) == Branch(shared_epochs=5, parent_id="t0", parent=first)
    assert sweep.waits(sweep.ask(early=2, late=20))


def test_what_a_trunk_asked_for_on_its_way_counts() -> None:
    sweep = Sweep({"late": 5})
    first = sweep.ask(early=1, midway=1, late=0)
    sweep.branch(first)
    suggest(first, "early", EARLY)
    sweep.trains(first, 1)
    other = sweep.ask(early=1, midway=2, late=0)
    assert sweep.waits(other)
    suggest(first, "midway", EARLY)
    sweep.trains(first, 6)
    assert sweep.branch(other) == Branch(keep_after=(5,)), "it differs in what was asked for after the first epoch"
    assert sweep.branch(sweep.ask(early=1, midway=1, late=20)).parent is first


def test_a_trunk_that_ends_before_it_has_kept_its_state_is_followed_by_another() -> None:
    sweep = Sweep({"late": 5})
    first = sweep.ask(early=1)
    sweep.branch(first)
    suggest(first, "early", EARLY)
    sweep.trains(first, 5)
    sweep.tree.note_end(first.number, list)
    second = sweep.ask(early=1)
    assert sweep.branch(second) == Branch(keep_after=(5,))
    sweep.tree.note_end(second.number, lambda: [5])
    assert sweep.branch(sweep.ask(early=1)).parent is second, "its end alone tells that it came so far"


def test_the_latest_stage_that_is_shared_is_taken_and_later_ones_are_kept() -> None:
    sweep = Sweep({"middle": 3, "late": 6})
    first = sweep.ask(early=1, middle=1, late=0)
    assert sweep.branch(first).keep_after == (3, 6)
    for name, space in (("early", EARLY), ("middle", EARLY), ("late", LATE)):
        suggest(first, name, space)
    sweep.trains(first, 7)
    assert sweep.branch(sweep.ask(early=1, middle=1, late=10)).shared_epochs == 6
    branch = sweep.branch(sweep.ask(early=1, middle=2, late=10))
    assert (branch.shared_epochs, branch.keep_after) == (3, (6,))


@pytest.mark.parametrize("epoch", [0, -1, 2.0, True])
def test_a_stage_that_cannot_be_is_refused(epoch: Any) -> None:
    with pytest.raises(InvalidSweep, match="it must be a whole number of at least 1"):
        stage("late", from_epoch=epoch)


def test_stages_beside_a_population_are_refused() -> None:
    with pytest.raises(InvalidSweep, match="stages cannot be combined with population="):
        optimize(optuna.create_study(), objectives.branches_off, population=Population(size=2))


# ---------------------------------------------------------------------- sweeps


def grid(objective: Callable[[optuna.Trial], float], folder: Path, **sweep: Any) -> optuna.Study:
    space = {"lr": [0.02, 0.1], "late": [0.0, 0.01, 0.1, 1.0]}
    made = optuna.create_study(sampler=optuna.samplers.GridSampler(space, seed=1))
    environ = {"TRACE_FILE": str(folder / "epochs")}
    optimize(made, objective, n_trials=8, slots=2, max_replicas=1, state_dir=folder / "state", environ=environ, **sweep)
    return made


def values_of(study: optuna.Study) -> dict[tuple[float, float], list[float]]:
    return {
        (trial.params["lr"], trial.params["late"]): [trial.intermediate_values[step] for step in range(6)]
        for trial in study.trials
    }


@pytest.fixture(scope="module")
def values_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, float], list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    alone = grid(objectives.branches_off_alone, folder, n_jobs=2)
    assert len((folder / "epochs").read_text().splitlines()) == 8 * 6
    return values_of(alone)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 8])
def test_shared_epochs_are_trained_once_and_give_the_values_that_they_give_alone(
    tmp_path: Path, values_alone: dict[tuple[float, float], list[float]], jobs: int
) -> None:
    """A sweep of eight trials."""
    assert declared_stages(objectives.branches_off) == {"late": 3}
    shared = grid(objectives.branches_off, tmp_path, n_jobs=jobs)
    assert values_of(shared) == {key: pytest.approx(values, rel=1e-6) for key, values in values_alone.items()}
    trained = (tmp_path / "epochs").read_text().splitlines()
    assert len(trained) == 2 * 3 + 8 * 3
    trials = {trial.number: trial for trial in shared.trials}
    branches = [trial for trial in trials.values() if PARENT in trial.user_attrs]
    assert len(branches) == 6
    for trial in branches:
        assert trial.user_attrs[SHARED_EPOCHS] == 3
        assert trials[trial.user_attrs[PARENT]].params["lr"] == trial.params["lr"]
