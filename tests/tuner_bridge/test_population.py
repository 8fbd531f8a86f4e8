"""Population based training, and trials that continue others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from dist_core.errors import NothingLeftToTrain
from scheduler.errors import RequestRefused
from tests.support.objectives import counts_its_samples, descends
from tests.support.sweep import POPULATION, Sweep, exploits_of
from tests.support.waiting import until
from trials.store.sql import SqlBacking
from tuner_bridge import Population, enqueue_from, optimize
from tuner_bridge.errors import InvalidSweep, SweepInterrupted
from tuner_bridge.optuna.population import ELASTIC, MEMBER, PARENT, Member, Standings
from tuner_bridge.optuna.population import POPULATION as SHARED
from tuner_bridge.optuna.population_before import PopulationBefore
from tuner_bridge.optuna.population_sweep import PopulationSweep
from tuner_bridge.optuna.trial_driver import Begun, Follow, OptunaDriver

SPACES: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.9, step=0.1),
    "depth": IntDistribution(1, 9, step=2),
    "batch": CategoricalDistribution([16, 32, 64]),
    "kind": CategoricalDistribution(["a", "b"]),
}
PARAMETERS = {"lr": 0.1, "momentum": 0.3, "depth": 3, "batch": 32, "kind": "a"}


# ---------------------------------------------------------------------- decisions


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0.01, 0.5), st.integers(0, 99))
def test_the_worst_go_on_from_the_best_and_nobody_from_a_worse_one(
    values: list[float], quantile: float, seed: int
) -> None:
    population = Population(size=20, quantile=quantile)
    scores = dict(enumerate(values))
    winners = {each: population.winner_for(each, scores, random.Random(seed)) for each in scores}
    replaced = {loser: winner for loser, winner in winners.items() if winner is not None}
    assert all(scores[winner] > scores[loser] for loser, winner in replaced.items())
    assert len(replaced) <= len(values) // 2
    assert not set(replaced) & set(replaced.values())
    if len(set(values)) == len(values) > 1:
        assert replaced, "of different scores the worst is replaced"


@given(st.integers(0, 10_000), st.floats(1.01, 4.0), st.floats(0.0, 1.0))
def test_what_is_explored_lies_within_its_space(seed: int, perturb: float, resample: float) -> None:
    population = Population(size=4, perturb=perturb, resample=resample)
    rng = random.Random(seed)
    drawn = {"lr": 0.5, "momentum": 0.9, "depth": 1, "batch": 64, "kind": "b"}
    changed: dict[str, Any] = dict(PARAMETERS)
    for _ in range(5):
        changed = population.explored(changed, SPACES, lambda name, space: drawn[name], rng)
    for name, space in SPACES.items():
        assert space._contains(space.to_internal_repr(changed[name])), (name, changed[name])


def test_only_the_parameters_that_are_named_change() -> None:
    population = Population(size=4, resample=0.0, parameters=["lr"])
    changed = population.explored(PARAMETERS, SPACES, lambda name, space: None, random.Random(1))
    assert changed["lr"] in (pytest.approx(0.12), pytest.approx(0.1 / 1.2))
    assert {**changed, "lr": 0.1} == PARAMETERS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 1}, "size is 1; it must be a whole number of at least 2"),
        ({"every": "soon"}, "every is 'soon'; write a number of epochs, such as 4"),
        ({"every": 0}, "every is 0; it must be at least 1 report"),
        ({"quantile": 0.6}, "quantile is 0.6; it must be above 0 and at most 0.5"),
        ({"explore": "best"}, "explore is 'best'; it must be 'perturb' or 'pb2'"),
        ({"perturb": 1.0}, "perturb is 1.0; it must be a factor above 1"),
        ({"resample": -0.1}, "resample is -0.1; it must be a probability"),
    ],
)
def test_a_population_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        Population(**{"size": 4, **options})


def test_members_that_are_ahead_wait_for_the_others() -> None:
    study = optuna.create_study()
    members = [Member(index, study.ask(), stretches=count) for index, count in enumerate([2, 1, 1])]
    standings = Standings(members)
    assert [standings.to_hold(each) for each in members] == [True, False, False]
    members[1].is_over = members[2].is_over = True
    assert not standings.to_hold(members[0])


# ---------------------------------------------------------------------- sweeps on a driver that trains in its threads


class Trains:
    """A driver whose trials have the loss ``1 / (rate * epochs)``, and go on from the epoch of their parents."""

    study_key = "s"
    template = SimpleNamespace(min_slots=1)

    def __init__(
        self,
        study: optuna.Study,
        *,
        epochs: int = 12,
        slots: int = 2,
        fails: float = -1.0,
        too_late: int = 0,
        refused: int = 0,
        by_lot: bool = False,
        dies_after: int | None = None,
        earlier: Trains | None = None,
    ) -> None:
        self.study = study
        self.slots = slots
        self.client = self
        self.requests: list[str] = []
        self.interrupted = False
        self._epochs, self._fails = epochs, fails
        self._too_late = too_late
        """Successors, so many, whose winner has come to its end before they could begin."""
        self._by_lot = by_lot
        """Scores are drawn, and successors take a while to start."""
        self.cancelled: set[str] = set() if earlier is None else earlier.cancelled
        self.untrained_parents: list[str] = []
        """Trials whose state others were to begin with before they had trained."""
        self._refused = refused
        """Successors, so many, whose winner is itself replaced or over before they are submitted."""
        self.ended: set[str] = set() if earlier is None else earlier.ended
        self.came_to: dict[str, int] = {} if earlier is None else earlier.came_to
        self.parents: dict[int, str] = {} if earlier is None else earlier.parents
        self.began_at: dict[str, int] = {} if earlier is None else earlier.began_at
        self._dies_after = dies_after
        """Reports until the process is killed."""
        self._paused: set[str] = set()

    def request(self, method: str, path: str, body: Any) -> None:
        self.requests.append(path)
        _, _, name, action = path.split("/")
        (self._paused.add if action == "pause" else self._paused.discard)(name)

    def _waits(self, name: str) -> bool:
        return name in self._paused and name not in self.cancelled and not self.interrupted

    def cancel(self, trial_id: str, why: str) -> None:
        self.requests.append(f"cancel {trial_id}")
        self.cancelled.add(trial_id)

    def submitted(self) -> list[dict[str, Any]]:
        def row(name: str) -> dict[str, Any]:
            state = "cancelled" if name in self.cancelled else "succeeded" if name in self.ended else "paused"
            return {"trial_id": name, "number": int(name[1:]), "state": state, "outcome": None}

        return [row(name) for name in self.came_to]

    def parent_of(self, trial: optuna.Trial) -> str:
        return self.parents[trial.number]

    def interrupt(self) -> None:
        self.interrupted = True

    def begins_with(self, number: int, parent_id: str) -> None:
        if parent_id not in self.came_to:
            self.untrained_parents.append(parent_id)
        self.parents[number] = parent_id

    def run(
        self, trial: optuna.Trial, *, follow: Follow, submitted: Callable[[str], None], begun: Begun | None = None
    ) -> float:
        rate = trial.suggest_float("lr", 0.1, 10.0)
        if begun is not None:
            name = f"t{begun.first.number}"
            submitted(name)
            # It goes on from its checkpoint, and reports again what it had reported.
            checkpoint = max(self.began_at[name], self.came_to[name] + 1 - 4)
            return self._train(trial, checkpoint, rate, name, follow, begun.reported)
        name = f"t{trial.number}"
        first = self.came_to[self.parents[trial.number]] + 1 if trial.number in self.parents else 0
        self.began_at[name] = first
        submitted(name)
        if trial.number in self.parents and self._by_lot:
            time.sleep(0.02)
        if trial.number in self.parents and self._too_late:
            self._too_late -= 1
            raise NothingLeftToTrain
        if trial.number in self.parents and self._refused:
            self._refused -= 1
            until(lambda: self.parents[trial.number] in self.ended)
            time.sleep(0.05)
            raise RequestRefused("its state was not kept")
        return self._train(trial, first, rate, name, follow)

    def _train(
        self,
        trial: optuna.Trial,
        first: int,
        rate: float,
        name: str,
        follow: Follow,
        reported: Collection[int] = (),
    ) -> float:
        try:
            value = self._train_on(trial, first, rate, name, follow, reported)
        except SweepInterrupted:
            raise
        except BaseException:
            self.ended.add(name)
            raise
        self.ended.add(name)
        return value

    def _train_on(
        self, trial: optuna.Trial, first: int, rate: float, name: str, follow: Follow, reported: Collection[int]
    ) -> float:
        loss, present = 0.0, trial
        for epoch in range(first, self._epochs):
            time.sleep(0.002)
            until(lambda: not self._waits(name))
            if rate == self._fails and epoch == 5:
                raise ZeroDivisionError
            if self._dies_after is not None:
                self._dies_after -= 1
                if self._dies_after < 0:
                    raise SweepInterrupted
            loss = random.Random(trial.number * 1000 + epoch).random() if self._by_lot else 1.0 / (rate * (epoch + 1))
            if epoch not in reported:
                present.report(loss, epoch)
            # Others begin with a state whose report has been made.
            self.came_to[name] = max(epoch, self.came_to.get(name, 0))
            if epoch in reported:
                continue
            if self._dies_after == 0:
                # What it has reported is written down, and nobody has acted on it.
                raise SweepInterrupted
            following = follow(present, epoch, loss, epoch == self._epochs - 1)
            if following is None:
                raise optuna.TrialPruned
            present = following
        return loss


def population_of(
    rates: Sequence[float],
    every: int = 3,
    explore: str = "perturb",
    study: optuna.Study | None = None,
    **options: Any,
) -> tuple[optuna.Study, Trains, Callable[..., None]]:
    if study is None:
        study = optuna.create_study()
    if not study.trials:
        for rate in rates:
            study.enqueue_trial({"lr": rate})
    driver = Trains(study, **options)
    population = Population(size=len(rates), every=every, seed=0, explore=explore)

    def run(**given: Any) -> None:
        PopulationSweep(cast("OptunaDriver", driver), population, **given).run()

    return study, driver, run


@pytest.mark.parametrize("explore", ["perturb", "pb2"])
def test_each_line_of_descent_has_each_epoch_once(explore: str) -> None:
    study, driver, run = population_of([0.1, 0.2, 5.0, 9.0], explore=explore)
    run()
    trials = {trial.number: trial for trial in study.trials}
    last = [trial for trial in trials.values() if 11 in trial.intermediate_values]
    assert all(lineage(trials, trial) == list(range(12)) for trial in last) and last
    assert any(words.startswith("cancel") for words in driver.requests), "somebody was replaced"
    paused = [words for words in driver.requests if words.endswith("/pause")]
    assert paused, "members that are ahead wait where slots are too few"
    resumed = {words.removesuffix("/resume") for words in driver.requests if words.endswith("/resume")}
    assert resumed <= {words.removesuffix("/pause") for words in paused}


@pytest.mark.parametrize("by_time", [True, False])
def test_a_sweep_that_is_told_to_stop_ends_its_members_at_their_next_stretch(by_time: bool) -> None:
    study, _, run = population_of([0.1, 0.2, 5.0, 9.0], slots=4, epochs=10_000)
    if by_time:
        run(timeout=0.05)
    else:
        run(callbacks=[lambda study, trial: study.stop() if trial.number > 4 else None])
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert max(max(trial.intermediate_values) for trial in study.trials) < 1000


def test_a_member_that_fails_ends_alone_where_its_error_is_caught_and_the_sweep_where_not() -> None:
    # By far the best one, which is not replaced before it fails, however late it is.
    study, driver, run = population_of([0.1, 9.0, 0.2, 0.3], slots=4, fails=9.0)
    run(catch=(ZeroDivisionError,))
    assert not driver.interrupted
    assert [trial.state for trial in study.trials].count(TrialState.FAIL) == 1
    study, driver, run = population_of([0.1, 9.0, 0.2, 0.3], slots=4, fails=9.0)
    with pytest.raises(ZeroDivisionError):
        run()
    assert driver.interrupted


def test_an_error_of_a_callback_ends_the_sweep_as_what_it_is() -> None:
    _, driver, run = population_of([0.1, 0.2, 5.0, 9.0], slots=4)

    def fails(study: optuna.Study, trial: FrozenTrial) -> None:
        raise KeyError("the callback's own")

    with pytest.raises(KeyError, match="the callback's own"):
        run(callbacks=[fails])
    assert driver.interrupted


def test_nobody_begins_with_a_member_that_has_not_trained_since_it_was_replaced() -> None:
    """A successor would wait for it for ever, while it waits for slots, which go to those that have trained less."""
    study, driver, run = population_of([0.1, 0.2, 0.3, 5.0, 7.0, 9.0], slots=6, epochs=40, by_lot=True)
    run()
    assert driver.untrained_parents == []
    assert any(PARENT in trial.user_attrs for trial in study.trials)


def test_a_member_whose_winner_was_itself_replaced_or_is_over_costs_no_sweep() -> None:
    study, _, run = population_of([0.1, 0.2, 5.0, 9.0], slots=4, epochs=60, refused=1)
    run()
    states = [trial.state for trial in study.trials]
    assert (states.count(TrialState.PRUNED), states.count(TrialState.FAIL)) == (1, 0)


def test_a_member_whose_winner_came_to_its_end_goes_on_from_another() -> None:
    study, _, run = population_of([0.1, 0.2, 5.0, 9.0], slots=4, epochs=60, too_late=2)
    run()
    pruned = [trial for trial in study.trials if trial.state is TrialState.PRUNED and not trial.intermediate_values]
    assert len(pruned) == 2
    for trial in pruned:
        later = [each for each in study.trials if each.number > trial.number]
        assert trial.user_attrs[MEMBER] in {each.user_attrs[MEMBER] for each in later}


@pytest.mark.parametrize(
    ("reports", "explore"),
    [*((reports, "perturb") for reports in (0, 1, 7, 12, 13, 20, 27, 33)), (7, "pb2"), (20, "pb2")],
)
def test_a_population_goes_on_where_its_driver_was_killed(tmp_path: Path, explore: str, reports: int) -> None:
    kept = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    rates, driver, deaths = [0.1, 0.2, 5.0, 9.0], None, 0
    for kills in (reports, reports // 2 + 3, None):
        _, driver, run = population_of(rates, study=kept, explore=explore, slots=4, dies_after=kills, earlier=driver)
        try:
            run(resume=True)
        except SweepInterrupted:
            deaths += 1
    # A population whose others are soon replaced by one at its end makes 21 reports.
    assert deaths >= (2 if reports <= 13 else 1 if reports <= 20 else 0)
    trials = {trial.number: trial for trial in kept.trials}
    assert {trial.state for trial in trials.values()} <= {TrialState.COMPLETE, TrialState.PRUNED}
    last = [trial for trial in trials.values() if 11 in trial.intermediate_values]
    assert len({trial.user_attrs[MEMBER] for trial in last}) == len(last) >= 1
    for trial in last:
        assert lineage(trials, trial) == list(range(12))
    for trial in trials.values():
        assert len({step // 3 for step in trial.intermediate_values}) <= 1, "a stretch is one"


def test_a_successor_whose_driver_was_killed_behind_its_first_report_goes_back_to_the_stretch_it_continues() -> None:
    """Its parent is named when it is asked for, and that one trains on until its state is there."""
    study, population = optuna.create_study(), Population(size=2, every=3)
    study.set_user_attr(SHARED, "mark")

    def left(member: int, steps: Sequence[int], state: TrialState, **attributes: Any) -> FrozenTrial:
        marks = {SHARED: "mark", MEMBER: member, **attributes}
        value = 0.5 if state is TrialState.COMPLETE else None
        reports = {step: 1.0 / (step + 1) for step in steps}
        study.add_trial(optuna.create_trial(state=state, value=value, user_attrs=marks, intermediate_values=reports))
        return study.trials[-1]

    left(0, [0, 1, 2], TrialState.COMPLETE)
    left(0, [3, 4, 5], TrialState.COMPLETE, **{ELASTIC: "t0", PARENT: 0})
    left(0, [6, 7, 8], TrialState.COMPLETE, **{ELASTIC: "t0", PARENT: 1})
    left(0, [], TrialState.RUNNING, **{ELASTIC: "t0", PARENT: 2})
    successor = left(1, [8], TrialState.RUNNING, **{PARENT: 1})
    rows = [{"trial_id": f"t{number}", "number": number, "state": "running", "outcome": None} for number in (0, 4)]
    before = PopulationBefore(population, study.trials, rows, -1.0)
    member = before.member(1)
    assert member is not None and member.stretch == successor and member.parent == 2
    winner = before.member(0)
    assert winner is not None and winner.parent is None


def test_a_population_that_has_ended_or_has_another_size_is_not_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    _, driver, run = population_of([0.1, 0.2, 5.0, 9.0], study=kept, slots=4)
    run(resume=True)
    count = len(kept.trials)
    _, _, run = population_of([0.1, 0.2, 5.0, 9.0], study=kept, slots=4, earlier=driver)
    run(resume=True)
    assert len(kept.trials) == count
    assert "nothing to resume" in caplog.text
    _, _, run = population_of([0.1, 0.2], study=kept, earlier=driver)
    with pytest.raises(InvalidSweep, match="size is 2, but the population to resume has at least 4 members"):
        run(resume=True)


def test_an_every_that_no_report_reaches_is_named() -> None:
    _, _, run = population_of([0.1, 0.2], every=20)
    with pytest.raises(InvalidSweep, match=r"every is 20, but no trial reported a step that ends a stretch \(19, 39"):
        run()


# ---------------------------------------------------------------------- sweeps


def lineage(trials: dict[int, FrozenTrial], last: FrozenTrial) -> list[int]:
    """The steps of a trial and of those that it goes back to, oldest first."""
    steps: list[int] = []
    trial: FrozenTrial | None = last
    while trial is not None:
        first = steps[0] if steps else 10**9
        steps = [*(step for step in sorted(trial.intermediate_values) if step < first), *steps]
        parent = trial.user_attrs.get(PARENT)
        trial = None if parent is None else trials[parent]
    return steps


@pytest.mark.slow
def test_a_population_trains_each_epoch_once_and_the_worst_go_on_from_the_best(tmp_path: Path) -> None:
    """Four members on two slots, so that they also wait for each other: five seconds of training."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for rate in (1e-5, 1e-4, 0.1, 0.2):
        study.enqueue_trial({"lr": rate, "epochs": 8})
    ended: list[int] = []
    optimize(
        study,
        descends,
        population=Population(size=4, every=2, parameters=["lr"], seed=1),
        slots=2,
        max_replicas=1,
        state_dir=tmp_path,
        callbacks=[lambda study, trial: ended.append(trial.number)],
    )
    trials = {trial.number: trial for trial in study.trials}
    assert sorted(ended) == sorted(trials)
    assert {trial.state for trial in trials.values()} <= {TrialState.COMPLETE, TrialState.PRUNED}
    last = [trial for trial in trials.values() if 7 in trial.intermediate_values]
    ended_with = {trial.user_attrs[MEMBER]: trial for trial in trials.values()}
    assert len({trial.user_attrs[MEMBER] for trial in last}) == len(last) >= 1
    for member, trial in ended_with.items():
        # On a busy machine the others may have come to their end before it could begin with their state.
        assert trial in last or trial.state is TrialState.PRUNED, member
    for trial in last:
        assert lineage(trials, trial) == list(range(8))
    for trial in trials.values():
        parent = trials.get(trial.user_attrs.get(PARENT, -1))
        if parent is not None and parent.user_attrs[MEMBER] != trial.user_attrs[MEMBER]:
            if trial.state is TrialState.PRUNED and not trial.intermediate_values:
                # On a busy machine it was itself replaced before its first report.
                continue
            # It goes on from the winner's weights, which are better than those that its member had.
            first = trial.intermediate_values[min(trial.intermediate_values)]
            (*_, before) = (
                each
                for each in trials.values()
                if each.number < trial.number and each.user_attrs[MEMBER] == trial.user_attrs[MEMBER]
            )
            if before.intermediate_values:
                # Its predecessor may have been replaced as soon.
                assert first < before.intermediate_values[max(before.intermediate_values)]
    assert study.best_value < 0.1


class Kills:
    """Kills a replica at each tenth exploit, and stops the study after so many."""

    def __init__(self, folder: Path, exploits: int) -> None:
        self.folder = folder
        self.exploits = exploits
        self.seen = 0
        self.killed = 0
        self._rng = random.Random(5)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.seen = len(exploits_of(study))
        if self.seen // 10 > self.killed:
            backing = SqlBacking(f"sqlite:///{self.folder / 'trials.db'}")
            running = [row for row in backing.replicas() if row.pid is not None and row.ready_at is not None]
            backing.close()
            if running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(running).pid or 0, signal.SIGKILL)
                    self.killed += 1
        if self.seen >= self.exploits:
            study.stop()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_members_outlive_processes_that_are_killed_and_train_each_sample_once(tmp_path: Path) -> None:
    """Twenty exploits, or as many as ELASTUNE_EXPLOITS says; each costs a process's start."""
    exploits = int(os.environ.get("ELASTUNE_EXPLOITS", "20"))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    kills = Kills(tmp_path, exploits)
    optimize(
        study,
        counts_its_samples,
        population=Population(size=6, every=2, quantile=0.4, seed=1),
        slots=3,
        max_replicas=1,
        state_dir=tmp_path,
        callbacks=[kills],
    )
    trials = {trial.number: trial for trial in study.trials}
    assert len(exploits_of(study)) >= exploits and kills.killed >= exploits // 10
    # A winner that was itself replaced at once has no state any more: another one's is taken then.
    taken_back = {trial.number for trial in trials.values() if trial.state is TrialState.PRUNED}
    assert not any(trials[number].intermediate_values for number in taken_back)
    last = {trial.user_attrs[MEMBER]: trial for trial in trials.values()}
    assert sorted(last) == list(range(6))
    # When the sweep is told to stop, one that has just lost its winner goes on from nobody.
    trained = [trial for trial in last.values() if trial.number not in taken_back]
    assert len(trained) >= 4
    assert {trial.state for trial in trained} == {TrialState.COMPLETE}, "no member was lost"
    for trial in trained:
        steps = lineage(trials, trial)
        assert steps == list(range(len(steps)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_population_whose_driver_is_killed_and_interrupted_goes_on_and_trains_each_sample_once(
    tmp_path: Path,
) -> None:
    """A population of real trainings is begun three times."""
    sweep = Sweep(tmp_path, trials=5, script=POPULATION)

    def exploits() -> int:
        with contextlib.suppress(KeyError):
            return len(exploits_of(sweep.study()))
        return 0

    try:
        process = sweep.start()
        sweep.until(lambda: exploits() > 0, 120.0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = exploits()
        process = sweep.start("--resume")
        sweep.until(lambda: exploits() > before, 120.0)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert "resume=True" in sweep.output()
        before = len(sweep.study().trials)
        assert sweep.start("--resume").wait(timeout=150) == 0, sweep.output()
    finally:
        sweep.end()
    trials = {trial.number: trial for trial in sweep.study().trials}
    assert len(trials) > before
    assert {trial.state for trial in trials.values()} <= {TrialState.COMPLETE, TrialState.PRUNED}
    last = {trial.user_attrs[MEMBER]: trial for trial in trials.values()}
    assert sorted(last) == [0, 1, 2, 3]
    for trial in last.values():
        steps = lineage(trials, trial)
        assert steps == list(range(len(steps)))


@pytest.mark.slow
@pytest.mark.usefixtures("scheduler")
def test_a_finished_trial_trains_on_from_its_end() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"lr": 0.01, "epochs": 3})
    study.enqueue_trial({"lr": 0.05, "epochs": 3})
    sweep: dict[str, Any] = {"max_replicas": 1, "keep_states": True}
    optimize(study, descends, n_trials=2, **sweep)
    best = study.best_trial
    assert enqueue_from(study, top=1, params={"epochs": 6}) == [best.number]
    optimize(study, descends, n_trials=1, **sweep)
    longer = study.trials[-1]
    assert sorted(longer.intermediate_values) == [3, 4, 5]
    assert longer.params == {**best.params, "epochs": 6}
    assert longer.value is not None and best.value is not None and longer.value < best.value
    assert enqueue_from(study, top=1, more_epochs=2) == [longer.number]
    optimize(study, descends, n_trials=1, **sweep)
    assert sorted(study.trials[-1].intermediate_values) == [6, 7]
    study.enqueue_trial(best.params, user_attrs={PARENT: best.number})
    with pytest.raises(Exception, match="nothing is left to train"):
        optimize(study, descends, n_trials=1, **sweep)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_trials": 4}, "n_trials and n_jobs cannot be combined with population="),
        ({"resume": True}, "this one is in memory"),
    ],
)
def test_what_means_nothing_beside_a_population_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSweep, match=words):
        optimize(optuna.create_study(), descends, population=Population(size=2), **options)


def test_a_continuation_of_nothing_is_refused() -> None:
    study = optuna.create_study()
    with pytest.raises(InvalidSweep, match="top is 1, and the study has 0 complete trials"):
        enqueue_from(study)
    study.add_trial(optuna.trial.create_trial(params={"lr": 0.1}, distributions={"lr": SPACES["lr"]}, value=1.0))
    with pytest.raises(InvalidSweep, match="more_epochs is -1; it must be a whole number of at least 0"):
        enqueue_from(study, more_epochs=-1)
    with pytest.raises(InvalidSweep, match="no trial has a parameter 'epochs'; they have lr"):
        enqueue_from(study, params={"epochs": 3})
