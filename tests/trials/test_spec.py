from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.project import ROOT
from trials.errors import IllegalTransition, InvalidTrialSpec
from trials.fields import Flag, Integer, Kind, Name, Text, Texts, Values, Variables, schema
from trials.spec import MOST_REPLICAS, TrialSpec
from trials.states import TRANSITIONS, TrialEvent, TrialState, next_state, state_diagram


def spec(**changes: Any) -> TrialSpec:
    return TrialSpec(**{"study": "s", "number": 0, "entrypoint": "package.module:main", **changes})


def test_a_spec_survives_the_wire() -> None:
    original = spec(
        payload={"a": [1, None]}, max_replicas=4, python_path=("/x",), preload=("torch",), environ={"A": "b"}
    )
    assert TrialSpec.from_json(original.to_json()) == original


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"study": ""}, "name of its study"),
        ({"number": -1}, "number is -1"),
        ({"entrypoint": "main"}, "package.module:function"),
        ({"entrypoint": "os:system('x')"}, "package.module:function"),
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 4, "max_replicas": 2}, "min_replicas is 4 but max_replicas is 2"),
        ({"max_replicas": 10**6}, "at most 4096"),
        ({"max_replicas": 2.5}, "whole number"),
        ({"min_replicas": True}, "whole number"),
        ({"study": 5}, "name of its study is 5"),
        ({"study": "x" * 256}, "string of 1 to 255 characters"),
        ({"number": 2**31}, "trial number is 2147483648; it must be a whole number from 0 to 2147483647"),
        ({"number": 1.5}, "trial number is 1.5"),
        ({"max_losses": "3"}, "max_losses is '3'"),
        ({"preemptible": "false"}, "preemptible is 'false'; it must be true or false"),
        ({"only_on": "gpu"}, "only_on is 'gpu'; it must be a list"),
        ({"environ": {"A": 1}}, "environ is"),
        ({"payload": 5}, "payload is 5"),
    ],
)
def test_contradictions_are_refused_with_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTrialSpec, match=words):
        spec(**changes)


def test_every_field_is_described_for_those_who_write_it_by_hand() -> None:
    described = schema(TrialSpec)
    assert set(described) == set(TrialSpec(study="s", number=0, entrypoint="m:f").to_json())
    assert described["max_replicas"] == {"type": "integer", "minimum": 1, "maximum": MOST_REPLICAS}
    assert described["environ"]["additionalProperties"] == {"type": "string"}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Integer(1, 3), [1, 3], [0, 4, True, 1.0, "1", None]),
        (Flag(), [True, False], [0, 1, "true", None]),
        (Name(), ["a", "a" * 255], ["", "a" * 256, 1, None]),
        (Text(), ["", "a\n"], [1, None, b"a"]),
        (Text(pattern="^[a-z]*$"), ["", "abc"], ["A", "abc\n"]),
        (Texts(), [(), ("a", "b")], ["ab", ["a"], (1,), None]),
        (Values(), [{}, {"a": [1]}], [[], None, "a"]),
        (Variables(), [{}, {"a": "1"}], [{"a": 1}, {1: "a"}, None]),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, list) else "",
)
def test_a_kind_takes_what_it_says_and_nothing_else(kind: Kind, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert kind.demand(value) is None
        assert kind.demand(kind.parsed(json.loads(json.dumps(kind.plain(value))))) is None
    for value in bad:
        assert kind.demand(value)


# ---------------------------------------- the transition table, and the diagram that the documentation prints from it


def test_the_ordinary_life() -> None:
    state = TrialState.PENDING
    for event in (
        TrialEvent.LAUNCHED,
        TrialEvent.TRAINS,
        TrialEvent.RESCALE_BEGAN,
        TrialEvent.RESCALE_ENDED,
        TrialEvent.EMPTIED,
        TrialEvent.LAUNCHED,
        TrialEvent.TRAINS,
        TrialEvent.VALUE_RETURNED,
    ):
        state = next_state(state, event)
    assert state is TrialState.SUCCEEDED


@given(st.sampled_from(TrialState), st.sampled_from(TrialEvent))
def test_unknown_pairs_raise_and_final_states_take_nothing(state: TrialState, event: TrialEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert not state.is_final
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            next_state(state, event)


def test_every_live_state_can_be_cancelled_and_given_up() -> None:
    for state in TrialState:
        if not state.is_final:
            assert next_state(state, TrialEvent.CANCELLED_BY_OWNER) is TrialState.CANCELLED
            assert next_state(state, TrialEvent.GAVE_UP) is TrialState.FAILED


def test_the_documentation_shows_the_table_as_it_is() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert f"```mermaid\n{state_diagram()}\n```" in page.read_text()
