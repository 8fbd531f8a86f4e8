"""Which layouts a trial has to choose from, and which one it has."""

from __future__ import annotations

from dist_core.goodput import Hints
from dist_core.goodput.layout_terms import usable
from dist_core.layout import Layout
from scheduler.knowledge.profile import TrialModel
from scheduler.knowledge.study_history import StudyHistory
from scheduler.snapshot import LayoutOption
from trials.record import TrialRecord


def present_layout(trial: TrialRecord, hints: Hints | None) -> str:
    """As the scheduler has chosen it; where it has chosen a number of slots only, as the code says what it did then."""
    chosen = Layout.from_name(trial.layout) if trial.layout else Layout(trial.slots_per_replica)
    if hints is None or not hints.layout:
        return trial.layout
    told = Layout.from_name(hints.layout)
    is_open = not chosen.kind and not chosen.recomputes
    return hints.layout if is_open and told.slots == chosen.slots else trial.layout


def layout_options(
    trial: TrialRecord, hints: Hints | None, history: StudyHistory, *, starts: bool
) -> tuple[LayoutOption, ...]:
    """Those that fit into a slot's memory, of the sizes that the trial allows; empty where there is no choice.

    As long as nobody has said what the code can do, a replica takes the least slots that it may. ``starts``: it has
    replicas, and may not have said it yet: what others say is no reason to start it anew.
    """
    spec = trial.spec
    if starts and trial.layout and (hints is None or not hints.layouts):
        return (_option(trial, trial.layout, trial.slots_per_replica, history.model(trial.trial_id, hints)),)
    terms, memory = history.layouts(hints)
    terms = [each for each in terms if each.layout.slots in spec.sizes]
    if not terms:
        return () if len(spec.sizes) == 1 else (_option(trial, str(spec.sizes[0]), spec.sizes[0], None),)
    least = 1 if hints is None or hints.bounds is None else hints.bounds.min_atomic
    fitting = usable(terms, memory, least)
    if not fitting and hints is not None and hints.layouts:
        # The code says so itself, and ends with that.
        fitting = [max(terms, key=lambda each: (each.most_examples(memory), each.layout.slots))]
    elif not fitting:
        fitting = terms
    found = [
        _option(trial, str(each.layout), each.layout.slots, history.model_of(trial.trial_id, hints, each, memory))
        for each in sorted(fitting, key=lambda each: (each.layout.slots, each.seconds, each.layout))
    ]
    return tuple(found) if all(each.model is not None for each in found) else (found[0],)


def _option(trial: TrialRecord, layout: str, slots: int, model: TrialModel | None) -> LayoutOption:
    spec = trial.spec
    return LayoutOption(
        layout=layout,
        slots_per_replica=slots,
        min_slots=spec.min_replicas * slots,
        max_slots=spec.max_replicas * slots,
        model=model,
    )
