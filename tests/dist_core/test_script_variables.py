"""Variables of a script around its loop over epochs: what has changed travels, the rest stays each process's own."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_core.state.counts import LoopSums
from dist_core.state.position import Position
from dist_core.state.script_variables import ScriptVariables


class Stopper:
    """As many scripts have one."""

    def __init__(self) -> None:
        self.best, self.waited, self.weights = float("inf"), 0, None

    def __call__(self, loss: float, model: nn.Module) -> bool:
        if loss < self.best:
            self.best, self.waited = loss, 0
            self.weights = {name: each.clone() for name, each in model.state_dict().items()}  # type: ignore[assignment]
        else:
            self.waited += 1
        return self.waited > 9


class Trainer:
    """Holds another object of the script."""

    def __init__(self) -> None:
        self.stopper, self.steps = Stopper(), 0


@dataclasses.dataclass(frozen=True)
class Sealed:
    """Its list may grow, and none of its attributes be set."""

    seen: list[int]
    pair: tuple[int, int] = (0, 0)


class Staged(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.stage, self.labels, self.cache = 0, torch.zeros(3), [0]


class Centres(nn.Module):
    """A loss that remembers by itself, in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen = torch.zeros(2), 0


def epochs(variables: ScriptVariables, numbers: range) -> Iterator[int]:
    variables.begin(sys._getframe(1))
    for number in numbers:
        yield number
        variables.look()


seen_by_all = 0


def script(variables: ScriptVariables, numbers: range, rank: int = 0) -> dict[str, Any]:
    global seen_by_all
    seen_by_all = 0
    trained, average, trainer = nn.Linear(2, 1), nn.Linear(2, 1), Trainer()
    losses, array, tensors, steps = [], np.zeros(3), [torch.zeros(2)], 0
    held, name, recent, best = {"rank": rank, "seen": 0}, f"rank {rank}", collections.deque[int](maxlen=4), None
    alias, flips, sealed, staged = tensors, 0, Sealed([]), Staged()
    uneven, numbered, drawn = set[int](), np.random.default_rng(0), random.Random(0)
    draws, centres = [0.0, 0.0], Centres()
    for number in numbers and epochs(variables, numbers):
        steps += 1
        seen_by_all += 1
        flips = 1 - flips
        losses.append(1.0 / (number + 1))
        array += number
        tensors[0] += 1.0
        held["seen"] += 1
        recent.append(number)
        sealed.seen.append(number)
        staged.stage = number
        centres.mean, centres.seen = 0.9 * centres.mean + number, centres.seen + 1
        staged.labels[0] += 1.0
        staged.cache.append(number)
        uneven |= {number} if number % 2 else set()
        draws = [float(numbered.random()), drawn.random()]
        average.weight.data.fill_(number)
        best = losses[-1]
        trainer.stopper(losses[-1] if number < 2 else 9.0, trained)
        trainer.steps += 1
    found = {
        "steps": steps,
        "seen by all": seen_by_all,
        "losses": list(losses),
        "array": array.tolist(),
        "tensor": alias[0].tolist(),
        "flips": flips,
    }
    found |= {
        "held": held["seen"],
        "name": name,
        "recent": list(recent),
        "sealed": list(sealed.seen),
        "staged": (staged.stage, staged.labels.tolist()),
        "centres": (centres.mean.tolist(), centres.seen),
        "uneven": sorted(uneven),
        "draws": draws,
        "average": average.weight.tolist(),
        "best": best,
    }
    stopper = trainer.stopper
    return found | {"trainer": (trainer.steps, stopper.best, stopper.waited, sorted(stopper.weights or ()))}


def of_script(warn: Any = pytest.fail) -> ScriptVariables:
    return ScriptVariables(Position(), lambda: lambda value: False, warn)


def test_one_that_goes_on_in_another_process_ends_as_if_nothing_had_been() -> None:
    told: list[str] = []
    whole = script(of_script(told.append), range(6))
    first = of_script(told.append)
    state: dict[str, Any] = {}

    def until_three() -> Iterator[int]:
        yield from range(3)
        state.update(first.state_dict())

    script(first, until_three())  # type: ignore[arg-type]  # numbers are what is asked for
    assert "name" not in state["variables"] and "trained" not in state["variables"]
    second = of_script(told.append)
    second.load_state_dict(state)
    ended = script(second, range(3, 6), rank=1)
    assert ended.pop("name") == "rank 1"
    assert ended == {key: each for key, each in whole.items() if key != "name"}


def test_what_is_undone_is_as_it_was() -> None:
    variables = of_script()

    def code() -> tuple[int, list[float], float]:
        count, history, tensor = 0, [0.5], torch.zeros(1)
        undo = variables.remember()
        for number in epochs(variables, range(2)):
            if number == 1:
                undo = variables.remember()
            count += 1
            history.append(float(number))
            tensor += 1.0
            if number == 1:
                undo()
                break
        return count, history, float(tensor)

    assert code() == (1, [0.5, 0.0], 1.0)


def test_generators_and_sealed_objects_are_left_alone_by_undoing() -> None:
    told: list[str] = []
    variables = of_script(told.append)

    def code() -> list[Any]:
        new, old, own, sealed = np.random.default_rng(0), np.random.RandomState(0), random.Random(0), Sealed([], (1, 2))
        for _ in epochs(variables, range(1)):
            old.randn()
            undo = variables.remember()
            sealed.seen.append(1)
            undo()
        return [float(new.random()), own.random(), sealed.seen, sealed.pair]

    assert code() == [float(np.random.default_rng(0).random()), random.Random(0).random(), [], (1, 2)]
    assert not told


def test_what_a_generator_has_kept_and_what_was_nothing_at_first_travel() -> None:
    def code(variables: ScriptVariables, numbers: range) -> tuple[list[float], Any]:
        drawn, recent, seen = np.random.RandomState(0), None, None
        values = []
        for number in epochs(variables, numbers):
            values.append(float(drawn.randn()))
            recent = collections.deque([number, *(recent or ())])
            seen = {number, *(seen or ())}
        return values, (recent, seen)

    whole = code(of_script(), range(4))
    first = of_script()
    state: dict[str, Any] = {}

    def until_three() -> Iterator[int]:
        yield from range(3)
        state.update(first.state_dict())

    code(first, until_three())  # type: ignore[arg-type]  # numbers are what is asked for
    second = of_script()
    second.load_state_dict(state)
    assert code(second, range(3, 4)) == whole


def test_another_loop_takes_nothing_of_it() -> None:
    variables = of_script()
    variables.load_state_dict({"code": "elsewhere:1", "in_loop": False, "variables": {"count": {"value": 7}}})
    count = 0
    for _ in epochs(variables, range(1)):
        count += 1
    assert count == 1


class Shadow:
    """An average of weights as a library has it: it keeps no attribute that scripts would know."""

    __module__ = "averages.shadow"

    def __init__(self, *, takes_its_state: bool = True) -> None:
        self.weights, self.takes_its_state = [torch.zeros(2)], takes_its_state

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.takes_its_state:
            raise ValueError("not now")
        self.weights = [each.clone() for each in state["weights"]]


class Taught(nn.Module):
    """A trained model within another module, beside an average of it, as in BYOL or an average that a library keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(2, 1)
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.teacher = nn.Linear(2, 1)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()))


def test_what_a_module_around_a_trained_one_has_of_its_own_travels() -> None:
    def code(
        variables: ScriptVariables, numbers: range, trained: set[int]
    ) -> tuple[list[float], list[float], float, dict[str, Any]]:
        learner: Any = Taught()
        with torch.no_grad():
            learner.teacher.weight.zero_()
            learner.heads[1].bias.zero_()
            trained |= {id(learner.online), id(learner.heads[0])}
            for number in epochs(variables, numbers):
                learner.teacher.weight += number
                learner.heads[1].bias += 1.0
                learner.steps += 1.0
                learner.online.weight.fill_(100.0 * number)
            moved = variables.tensors()
        found = learner.teacher.weight.flatten().tolist(), learner.heads[1].bias.tolist()
        return *found, float(learner.steps), moved

    trained: set[int] = set()
    first, second = (ScriptVariables(Position(), lambda: lambda value: id(value) in trained, pytest.fail) for _ in "ab")
    state: dict[str, Any] = {}

    def until_two() -> Iterator[int]:
        yield from range(2)
        state.update(first.state_dict())

    code(first, until_two(), trained)  # type: ignore[arg-type]  # numbers are what is asked for
    assert sorted(state["variables"]) == ["learner.heads.1", "learner.steps", "learner.teacher"]
    second.load_state_dict(state)
    teacher, head, steps, moved = code(second, range(2, 4), trained)
    assert (teacher, head, steps) == ([6.0, 6.0], [4.0], 4.0)
    assert {"learner.teacher.weight", "learner.steps"} <= set(moved) and "learner.online.weight" not in moved


@pytest.mark.parametrize("takes_its_state", [True, False])
def test_objects_of_libraries_travel_by_their_state_or_are_told_of(takes_its_state: bool) -> None:
    def code(variables: ScriptVariables, numbers: range) -> list[float]:
        average = Shadow(takes_its_state=takes_its_state)
        for _ in epochs(variables, numbers):
            before = variables.tensors()["average['weights'][0]"][1]
            average.weights[0] += 1.0
            assert variables.tensors()["average['weights'][0]"][1] != before
        found: list[float] = average.weights[0].tolist()
        return found

    told: list[str] = []
    first, second = of_script(), of_script(told.append)
    state: dict[str, Any] = {}

    def until_two() -> Iterator[int]:
        yield from range(2)
        state.update(first.state_dict())

    code(first, until_two())  # type: ignore[arg-type]  # numbers are what is asked for
    second.load_state_dict(state)
    assert code(second, range(2, 4)) == ([4.0, 4.0] if takes_its_state else [2.0, 2.0])
    assert bool(told) is not takes_its_state


class Meter:
    def __init__(self) -> None:
        self.count = 0


def an_epoch(sums: LoopSums, batches: Iterable[float], *, completed: bool = False) -> tuple[float, float, int, str]:
    """Sums of a function that trains for an epoch, as scripts have it."""
    total, tensor, meter, name = 0.0, torch.zeros(()), Meter(), "train"
    sums.loop_began(completed=completed)
    for batch in batches:
        total += batch
        tensor += batch
        meter.count += 1
    return total, float(tensor), meter.count, name


@pytest.mark.parametrize("alone", [True, False])
def test_sums_of_a_loop_go_on_where_a_trial_resumes_within_it(alone: bool) -> None:
    position: Any = SimpleNamespace(in_training_loop=True, epoch=3, loops_begun=1)
    first, second = (LoopSums(position, lambda: alone) for _ in range(2))
    state: dict[str, Any] = {}

    def until_three() -> Iterator[float]:
        yield from (1.0, 2.0, 3.0)
        state.update(copy.deepcopy(first.state_dict()))
        yield 4.0

    assert an_epoch(first, until_three())[0] == 10.0
    position.in_training_loop = False
    second.load_state_dict(state)
    # Loops that the trial had completed before are run through first.
    assert an_epoch(second, (), completed=True)[0] == 0.0
    assert an_epoch(second, (4.0,)) == ((10.0, 10.0, 4, "train") if alone else (4.0, 4.0, 1, "train"))
    assert an_epoch(second, (4.0,))[0] == 4.0, "the next epoch begins with none"
    position.epoch = 4
    second.load_state_dict(state)
    assert an_epoch(second, (4.0,))[0] == 4.0, "so it does where the trial was saved at the end of one"
    assert second.state_dict() == {}
