"""The life of a trial: one table of transitions. An event that the table does not know raises and changes nothing."""

from __future__ import annotations

import enum
import sys

from trials.errors import IllegalTransition


class TrialState(enum.Enum):
    PENDING = "pending"
    """Submitted, holds no slot."""
    STARTING = "starting"
    """Replicas are being started; none trains yet."""
    RUNNING = "running"
    RESCALING = "rescaling"
    """Trains on its present replicas while the next set is being prepared."""
    PAUSED = "paused"
    """Holds no slot; resumes from its checkpoint."""
    SUCCEEDED = "succeeded"
    PRUNED = "pruned"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES

    @property
    def holds_slots(self) -> bool:
        return self in (TrialState.STARTING, TrialState.RUNNING, TrialState.RESCALING)


FINAL_STATES = frozenset({TrialState.SUCCEEDED, TrialState.PRUNED, TrialState.CANCELLED, TrialState.FAILED})


class TrialEvent(enum.Enum):
    LAUNCHED = "launched"
    TRAINS = "trains"
    RESCALE_BEGAN = "rescale began"
    RESCALE_ENDED = "rescale ended"
    EMPTIED = "emptied"
    """All replicas have left: paused, preempted or lost."""
    VALUE_RETURNED = "value returned"
    PRUNED_BY_TUNER = "pruned by tuner"
    CANCELLED_BY_OWNER = "cancelled by owner"
    GAVE_UP = "gave up"
    """The user's code raised, or the retry budget for losses is used up."""


_LIVE = (TrialState.PENDING, TrialState.STARTING, TrialState.RUNNING, TrialState.RESCALING, TrialState.PAUSED)

TRANSITIONS: dict[tuple[TrialState, TrialEvent], TrialState] = {
    (TrialState.PENDING, TrialEvent.LAUNCHED): TrialState.STARTING,
    (TrialState.PAUSED, TrialEvent.LAUNCHED): TrialState.STARTING,
    (TrialState.STARTING, TrialEvent.TRAINS): TrialState.RUNNING,
    (TrialState.RUNNING, TrialEvent.RESCALE_BEGAN): TrialState.RESCALING,
    (TrialState.RESCALING, TrialEvent.RESCALE_ENDED): TrialState.RUNNING,
    (TrialState.STARTING, TrialEvent.EMPTIED): TrialState.PAUSED,
    (TrialState.RUNNING, TrialEvent.EMPTIED): TrialState.PAUSED,
    (TrialState.RESCALING, TrialEvent.EMPTIED): TrialState.PAUSED,
    **{(state, TrialEvent.VALUE_RETURNED): TrialState.SUCCEEDED for state in _LIVE if state != TrialState.PENDING},
    **{(state, TrialEvent.PRUNED_BY_TUNER): TrialState.PRUNED for state in _LIVE if state != TrialState.PENDING},
    **{(state, TrialEvent.CANCELLED_BY_OWNER): TrialState.CANCELLED for state in _LIVE},
    **{(state, TrialEvent.GAVE_UP): TrialState.FAILED for state in _LIVE},
}


def next_state(state: TrialState, event: TrialEvent) -> TrialState:
    """Return the state after ``event``; raise IllegalTransition when the table has no such row."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a trial that is {state.value} cannot take the event '{event.value}'") from None


def state_diagram() -> str:
    """Draw one line a transition, in the table's order; events between the same two states share an arrow."""
    arrows: dict[tuple[TrialState, TrialState], list[str]] = {}
    for (state, event), after in TRANSITIONS.items():
        arrows.setdefault((state, after), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {TrialState.PENDING.name}: submitted"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in TrialState if state in FINAL_STATES]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(state_diagram() + "\n")
