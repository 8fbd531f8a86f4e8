"""The transition table, and the diagram that the documentation prints from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.project import ROOT
from trials.errors import IllegalTransition
from trials.states import TRANSITIONS, TrialEvent, TrialState, next_state, state_diagram


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
