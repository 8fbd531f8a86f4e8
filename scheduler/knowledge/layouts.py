"""Layouts that a trial has to choose from, and the one that it has."""

from __future__ import annotations

from typing import Any

from dist_core.goodput import Hints
from dist_core.goodput.layout_terms import usable
from dist_core.layout import WHOLE, Layout
from scheduler.knowledge.profile import TrialModel
from scheduler.knowledge.study_history import StudyHistory
from scheduler.snapshot import LayoutOption
from trials.record import TrialRecord


def present_layout(trial: TrialRecord, hints: Hints | None) -> str:
    """Return the trial's present layout: the scheduler's choice, completed by what the code reports."""
    return as_told(trial.layout or str(trial.slots_per_replica), hints) if trial.layout or _tells(hints) else ""


def as_told(layout: str, hints: Hints | None) -> str:
    """Complete a layout as the code does: given a number of slots alone, or a layout that it does not know."""
    if hints is None or not hints.layout:
        return layout
    asked, told = Layout.from_name(layout), Layout.from_name(hints.layout)
    known = {str(each.layout) for each in hints.layouts}
    is_open = (asked.kind == WHOLE and not asked.recomputes) or (bool(known) and layout not in known)
    return hints.layout if is_open and told.slots == asked.slots else layout


def _tells(hints: Hints | None) -> bool:
    return hints is not None and bool(hints.layout)


def layout_options(
    trial: TrialRecord, hints: Hints | None, history: StudyHistory, *, starts: bool
) -> tuple[LayoutOption, ...]:
    """Return the options that fit into a slot's memory, of the sizes that the trial allows; empty for no choice.

    As long as nobody has said what the code can do, a replica takes the least slots that it may. ``starts``: it has
    replicas, and may not have said it yet: what others say is no reason to start it anew.
    """
    spec = trial.spec
    if not spec.replica_sizes:
        return ()
    if starts and trial.layout and (hints is None or not hints.layouts):
        return (_option(trial, trial.layout, trial.slots_per_replica, history.model(trial.trial_id, hints)),)
    terms, memory = history.layouts(trial.trial_id, hints)
    terms = [each for each in terms if each.layout.slots in spec.sizes]
    if not terms:
        return (_option(trial, str(spec.sizes[0]), spec.sizes[0], None),)
    least = 1 if hints is None or hints.bounds is None else hints.bounds.min_atomic
    fitting = usable(terms, memory, least)
    room = {each.layout: memory for each in fitting}
    if hints is not None and hints.slot_memory_bytes is not None:
        # Where it is it may go on as it does, though others' slots have less.
        for each in usable(terms, hints.slot_memory_bytes, least):
            if str(each.layout) == hints.layout and each not in fitting:
                fitting = [*fitting, each]
                room[each.layout] = hints.slot_memory_bytes
    if not fitting and hints is not None and hints.layouts:
        # The code says so itself, and ends with that.
        fitting = [max(terms, key=lambda each: (each.most_examples(memory), each.layout.slots))]
    elif not fitting:
        fitting = terms
    options = [
        _option(
            trial,
            str(each.layout),
            each.layout.slots,
            history.model_of(trial.trial_id, hints, each, room.get(each.layout, memory)),
        )
        for each in sorted(fitting, key=lambda each: (each.layout.slots, each.seconds, each.layout))
    ]
    if all(each.model is not None for each in options):
        return tuple(options)
    # Nothing says how they compare: it stays with what it has.
    present = present_layout(trial, hints)
    return (next((each for each in options if each.layout == present), options[0]),)


def layout_fields(
    trial: TrialRecord, hints: Hints | None, history: StudyHistory, layout: str, *, starts: bool
) -> dict[str, Any]:
    """Fields of its view that follow from what it may choose from; ``layout``: that it has, or is going to."""
    options = layout_options(trial, hints, history, starts=starts)
    if not options:
        return {
            "min_slots": trial.spec.min_slots,
            "max_slots": trial.spec.max_slots,
            "slots_per_replica": trial.slots_per_replica,
            "model": history.model(trial.trial_id, hints),
        }
    present = next((each for each in options if each.layout == layout), options[0])
    return {
        "options": options,
        "min_slots": min(each.min_slots for each in options),
        "max_slots": max(each.max_slots for each in options),
        "slots_per_replica": present.slots_per_replica,
        "model": present.model,
    }


def _option(trial: TrialRecord, layout: str, slots: int, model: TrialModel | None) -> LayoutOption:
    spec = trial.spec
    return LayoutOption(
        layout=layout,
        slots_per_replica=slots,
        min_slots=spec.min_replicas * slots,
        max_slots=spec.max_replicas * slots,
        model=model,
    )
