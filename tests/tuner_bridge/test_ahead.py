"""Values that travel ahead: whatever an objective asks, in whatever order, it gets what Optuna alone would give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner_bridge.optuna.ahead import LookAhead, TakenAhead, space_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
Call = tuple[str, dict[str, Any]]
"""A suggestion: method and arguments."""

SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "Random": lambda: optuna.samplers.RandomSampler(seed=3),
    "TPE": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=2),
    "GP": lambda: optuna.samplers.GPSampler(seed=3, n_startup_trials=2),
    "QMC": lambda: optuna.samplers.QMCSampler(seed=3, warn_independent_sampling=False),
}


def number(name: str, high: int = 3) -> Call:
    return "suggest_int", {"name": name, "low": 0, "high": high, "step": 1, "log": False}


def choice(name: str, choices: Sequence[Any] = ("a", "b")) -> Call:
    return "suggest_categorical", {"name": name, "choices": list(choices)}


def plain(sampler: optuna.samplers.BaseSampler, trials: Sequence[Sequence[Call]]) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=sampler)
    for calls in trials:
        trial = study.ask()
        values = [getattr(trial, method)(**arguments) for method, arguments in calls]
        study.tell(trial, float(sum(value for value in values if isinstance(value, int))))
    return [trial.params for trial in study.trials]


class Replica:
    """Asks as a replica does, and counts its questions."""

    def __init__(self, look_ahead: LookAhead, trial: optuna.Trial) -> None:
        self._look_ahead, self._trial = look_ahead, trial
        self._ahead = TakenAhead()
        self.name = str(id(self))
        self.asked = 0

    def suggest(self, method: str, arguments: dict[str, Any]) -> Any:
        taken = self._ahead.take(arguments["name"], space_of(method, arguments))
        if taken is not None:
            return self._of(arguments, taken[0])
        self.asked += 1
        self.tell()
        value, entries = self._look_ahead.suggest(self._trial, method, arguments, self.name)
        self._ahead.came(entries)
        return value

    def tell(self) -> None:
        numbers = self._ahead.untold
        self._look_ahead.take(self._trial, numbers)
        self._ahead.told(numbers)

    def _of(self, arguments: dict[str, Any], value: Any) -> Any:
        return arguments["choices"][value] if "choices" in arguments else value


def ours(
    sampler: optuna.samplers.BaseSampler, trials: Sequence[Sequence[Call]], replicas: int = 1
) -> tuple[list[dict[str, Any]], list[int]]:
    """The parameters of the trials, and how many questions each one's first replica has asked."""
    study = optuna.create_study(sampler=sampler)
    look_ahead, asked = LookAhead(study), []
    for calls in trials:
        trial = study.ask()
        those = [Replica(look_ahead, trial) for _ in range(replicas)]
        values = [[each.suggest(*call) for call in calls] for each in those]
        assert all(each == values[0] for each in values), "replicas of one trial were told different values"
        for each in those:
            each.tell()
        look_ahead.close(trial)
        study.tell(trial, float(sum(value for value in values[0] if isinstance(value, int))))
        asked.append(those[0].asked)
    return [trial.params for trial in study.trials], asked


call = st.one_of(
    st.sampled_from([number("n"), number("one", 0), choice("kind"), choice("flag", [True, 1, None])]),
    st.integers(0, 6).map(lambda at: number(f"x{at}")),
    st.integers(8, 11).map(lambda at: choice(f"layer{at:02}.kind")),
)
"""Repeats among them, which are the trial's own values again."""


@given(
    trials=st.lists(st.lists(call, max_size=8), min_size=1, max_size=5),
    sampler=st.sampled_from(["Random", "TPE"]),
    replicas=st.integers(1, 2),
)
def test_any_program_draws_what_it_draws_alone(trials: list[list[Call]], sampler: str, replicas: int) -> None:
    found, _ = ours(SAMPLERS[sampler](), trials, replicas)
    assert found == plain(SAMPLERS[sampler](), trials)


@given(
    base=st.lists(call, min_size=2, max_size=8, unique_by=lambda each: each[1]["name"]),
    kept=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=2, max_size=5),
    sampler=st.sampled_from(["Random", "TPE"]),
)
def test_trials_that_leave_parameters_out_draw_what_they_draw_alone(
    base: list[Call], kept: list[list[bool]], sampler: str
) -> None:
    """A value that was drawn behind one that is not asked for is another one then."""
    trials = [[call for call, keep in zip(base, each, strict=False) if keep] for each in kept]
    found, _ = ours(SAMPLERS[sampler](), trials)
    assert found == plain(SAMPLERS[sampler](), trials)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_every_kind_of_sampler(sampler: str) -> None:
    calls = [number("a"), choice("b"), number("c", 9)]
    branch = [number("a"), number("d")]
    trials = [calls, calls, branch, calls, calls, branch]
    found, _ = ours(SAMPLERS[sampler](), trials)
    assert found == plain(SAMPLERS[sampler](), trials)


def test_a_large_space_takes_few_questions() -> None:
    """A loop's first trial asks as its counting doubles, later ones once for each answer's worth."""
    trials = [[number(f"b{at}") for at in range(1000)]] * 3
    found, asked = ours(SAMPLERS["Random"](), trials)
    assert found == plain(SAMPLERS["Random"](), trials)
    assert asked[0] <= 14
    assert asked[1:] == [4, 4]


def test_a_queued_trial_has_its_values() -> None:
    study = optuna.create_study(sampler=SAMPLERS["Random"]())
    look_ahead = LookAhead(study)
    for queued in ({}, {"b": 2, "c": 1}):
        study.enqueue_trial(queued)
        trial = study.ask()
        replica = Replica(look_ahead, trial)
        values = {name: replica.suggest(*number(name)) for name in "abc"}
        replica.tell()
        look_ahead.close(trial)
        study.tell(trial, 0.0)
        assert values == study.trials[-1].params
        assert values == {**values, **queued}
    assert replica.asked == 1


def test_what_was_not_taken_is_not_in_the_study() -> None:
    trials = [[number("a"), number("b"), number("c")], [number("a"), number("b")]]
    found, _ = ours(SAMPLERS["Random"](), trials)
    assert list(found[1]) == ["a", "b"]


def test_a_replica_that_starts_again_is_told_what_its_trial_had() -> None:
    study = optuna.create_study(sampler=SAMPLERS["Random"]())
    look_ahead, trial = LookAhead(study), study.ask()
    first = Replica(look_ahead, trial)
    values = [first.suggest(*number(f"x{at}")) for at in range(9)]
    second = Replica(look_ahead, trial)
    assert [second.suggest(*number(f"x{at}")) for at in range(9)] == values
    assert second.asked == 1, "one answer brings all that the trial has drawn"


def test_another_space_for_a_name_is_optunas_to_judge() -> None:
    trials = [[number("a"), number("b")], [number("a"), number("b", 5)]]
    found, asked = ours(SAMPLERS["Random"](), trials)
    assert found == plain(SAMPLERS["Random"](), trials)
    assert asked == [2, 2]


def test_replicas_that_ask_for_different_things_have_what_the_study_has() -> None:
    """A value that one took stays, although the other's question has undone what was drawn ahead."""
    study = optuna.create_study(sampler=SAMPLERS["Random"]())
    look_ahead = LookAhead(study)
    for _ in range(3):
        trial = study.ask()
        first, second = Replica(look_ahead, trial), Replica(look_ahead, trial)
        values = {"a": first.suggest(*number("a"))}
        values["z"] = second.suggest(*number("z"))
        values |= {name: first.suggest(*number(name, 99)) for name in "bcd"}
        first.tell()
        look_ahead.close(trial)
        study.tell(trial, 0.0)
        assert study.trials[-1].params == values
