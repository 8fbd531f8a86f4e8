from __future__ import annotations

import functools
from typing import Any

from tuner_bridge.driving.left_behind import left_behind

best: Any = None
MODELS: dict[str, Any] = {}
ROWS: list[int] = []
SIZE = 3


class Keeper:
    model: Any = None
    rounds = 0


KEEPER = Keeper()


def sets_a_global(trial: Any) -> float:
    global best
    best = trial
    return 0.0


def helper(trial: Any) -> None:
    MODELS["last"] = trial
    ROWS.append(SIZE)
    KEEPER.model = trial


def calls_a_helper(trial: Any) -> float:
    helper(trial)
    return float(sum(each for each in [SIZE]))


def reads_all(study: Any, trial: Any) -> None:
    print(best, MODELS, ROWS, SIZE, KEEPER.model, KEEPER.rounds)


class Objective:
    def __init__(self) -> None:
        self.model: Any = None
        self.width = 3

    def __call__(self, trial: Any) -> float:
        self.model = trial
        return self.width

    def keep(self, study: Any, trial: Any) -> None:
        print(self.model, self.width)


def test_what_an_objective_sets_and_a_callback_reads_is_named() -> None:
    assert left_behind(sets_a_global, [reads_all]) == ["best"]
    assert left_behind(calls_a_helper, [reads_all]) == ["KEEPER.model", "MODELS", "ROWS"]
    assert left_behind(functools.partial(calls_a_helper), [lambda study, trial: print(MODELS)]) == ["MODELS"]
    objective = Objective()
    assert left_behind(objective, [objective.keep]) == ["Objective.model"]
    assert left_behind(objective.__call__, [objective.keep]) == ["Objective.model"]


def test_what_nobody_reads_and_what_cannot_be_looked_into_is_passed_over() -> None:
    assert left_behind(sets_a_global, []) == []
    assert left_behind(sets_a_global, [lambda study, trial: print(SIZE)]) == []
    assert left_behind(calls_a_helper, [print]) == []
    assert left_behind(len, [reads_all]) == []
