"""What a tuner tried reaches the scheduler once, and which of it mattered can be told."""

from __future__ import annotations

import math
import random

import pytest

from tuner_bridge.driving.exchange import ToldParameters, flattened
from tuner_bridge.optuna.importance import importance


def test_what_was_noted_waits_until_it_was_told() -> None:
    told = ToldParameters()
    told.note("a", {"lr": 0.1, "act": ("relu", 2), "bad": math.nan})
    told.note("b", {"lr": 0.2})
    first = told.waiting()
    assert first == {"a": {"lr": 0.1, "act": "('relu', 2)", "bad": "nan"}, "b": {"lr": 0.2}}
    told.note("a", {"lr": 0.3, "depth": 4})
    told.are_told(first)
    assert told.waiting() == {"a": {"lr": 0.3, "depth": 4}}
    told.are_told(told.waiting())
    assert told.waiting() == {}


def test_nested_choices_are_named_by_their_path() -> None:
    assert flattened({"a": 1, "layer": {"size": 3, "act": {"_name": "relu"}}}) == {
        "a": 1,
        "layer.size": 3,
        "layer.act._name": "relu",
    }


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_parameter_that_matters_comes_first(direction: str) -> None:
    draw = random.Random(0)
    ended = []
    for _ in range(60):
        lr, width, kind = 10 ** draw.uniform(-4, 0), draw.randint(8, 64), draw.choice(["a", "b"])
        loss = (math.log10(lr) + 2) ** 2 + 0.001 * width
        ended.append(({"lr": lr, "width": width, "kind": kind, "same": 1}, loss if direction == "minimize" else -loss))
    found = importance(ended, direction)
    assert next(iter(found)) == "lr"
    assert set(found) == {"lr", "width", "kind"}
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-3)


def test_without_a_choice_there_is_nothing_to_tell() -> None:
    with pytest.raises(ValueError, match="a parameter that all finished trials have"):
        importance([({"a": 1}, 0.5), ({"a": 1}, 0.7)], "minimize")
    with pytest.raises(ValueError, match="a parameter that all finished trials have"):
        importance([({"a": 1}, 0.5), ({"b": 1}, 0.7)], "minimize")
