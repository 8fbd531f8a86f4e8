"""The transition table as a Mermaid diagram: ``python -m trials.state_diagram`` prints what the documentation shows."""

from __future__ import annotations

import sys

from trials.states import FINAL_STATES, TRANSITIONS, TrialState


def state_diagram() -> str:
    """One line a transition, in the table's order; events between the same two states share an arrow."""
    arrows: dict[tuple[TrialState, TrialState], list[str]] = {}
    for (state, event), after in TRANSITIONS.items():
        arrows.setdefault((state, after), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {TrialState.PENDING.name}: submitted"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in TrialState if state in FINAL_STATES]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(state_diagram() + "\n")
