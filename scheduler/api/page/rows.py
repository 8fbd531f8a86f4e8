"""Rows of trials, studies and slots for the page: plain JSON, short, and without what only its own view needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from scheduler.loop.observations import is_driven
from scheduler.snapshot import NodeView, TrialView
from trials.record import ReplicaRecord, Report, Study, TrialRecord, WaitingJob
from trials.store.base import SlotInterval

LONGEST_SENTENCE = 300
MOST_PARAMETERS = 100
LONGEST_VALUE = 200


REPLICA_FIELDS = ("replica_id", "node", "slot", "job", "launched_at", "ready_at", "gone_at", "exit_status", "pid")


def trial_row(
    record: TrialRecord,
    *,
    view: TrialView | None = None,
    hints: Mapping[str, Any] | None = None,
    latest: Report | None = None,
    expected_start: float | None = None,
    for_reader: bool = False,
) -> dict[str, Any]:
    """Return one line of the table; times in seconds since the epoch, goodput in initial examples a second.

    ``expected_start``: of a trial that waits, as far as that can be told. ``for_reader``: without the arguments of a
    command, which may hold anything.
    """
    spec, outcome = record.spec, record.outcome
    row: dict[str, Any] = {
        "id": record.trial_id,
        "study": spec.study,
        "number": spec.number,
        "state": record.state.value,
        "code": record.reason.code,
        "why": record.reason.sentence[:LONGEST_SENTENCE],
        "replicas": len(record.members) // record.slots_per_replica,
        "min": spec.min_replicas,
        "max": spec.max_replicas,
        "size": record.slots_per_replica,
        "submitted": record.submitted_at,
    }
    if record.finished_at is not None:
        row["finished"] = record.finished_at
    if record.layout:
        row["layout"] = record.layout
    if spec.parent:
        row["parent"] = spec.parent
    if record.losses:
        row["losses"] = record.losses
    if record.hold is not None:
        row["held"] = record.hold[:LONGEST_SENTENCE]
    if record.parameters and not (for_reader and "command" in spec.payload):
        row["parameters"] = shown_parameters(record.parameters)
    if latest is not None:
        row |= {"step": latest.step, "latest": latest.value, "progress": latest.progress}
    if outcome is not None:
        row["value"] = number_of(outcome.value) if outcome.kind == "value" else None
        if outcome.kind == "error":
            row["error"] = f"{outcome.error_type or 'error'}: {outcome.message}"[:LONGEST_SENTENCE]
    if not record.state.is_final:
        row |= _live(view, hints)
        if expected_start is not None:
            row["expected"] = expected_start
    return row


def _live(view: TrialView | None, hints: Mapping[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if view is not None:
        row |= {"slots": view.held_slots, "promise": round(view.promise, 4)}
        if view.rank_sentence:
            row["rank"] = view.rank_sentence[:LONGEST_SENTENCE]
    if hints is not None and hints.get("bounds") is not None:
        target = hints.get("target_progress")
        row |= {
            "batch": hints.get("global_batch", 0),
            "goodput": round(float(hints.get("goodput", 0.0)), 3),
            "epoch": hints.get("epoch", 0),
            "progress": hints.get("progress", 0.0),
        }
        if target:
            row["done"] = round(min(1.0, hints.get("progress", 0.0) / target), 4)
        if hints.get("learning_rate") is not None:
            row["rate"] = hints["learning_rate"]
    return row


def number_of(value: Any) -> float | list[float] | None:
    """Return an objective's result for plots: a number, several, or None for anything else and for what is not finite.

    Replicas wrap numbers that JSON has no word for in an object of their own.
    """
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping) and len(value) == 1:
        return number_of(next(iter(value.values())))
    if isinstance(value, list) and value:
        numbers = [number_of(each) for each in value]
        several = [each for each in numbers if isinstance(each, float)]
        return several if len(several) == len(numbers) else None
    return None


def shown_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, truth values and None as they are; everything else as a short text."""
    shown: dict[str, Any] = {}
    for name in list(parameters)[:MOST_PARAMETERS]:
        value = parameters[name]
        plain = value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        shown[name[:LONGEST_VALUE]] = value if plain else str(value)[:LONGEST_VALUE]
    return shown


def study_row(study: Study, now: float) -> dict[str, Any]:
    return {
        "name": study.name,
        "title": study.called,
        "direction": study.direction,
        "user": study.user,
        "driven": is_driven(study, now),
        **study.terms.to_json(),
    }


def node_row(node: NodeView) -> dict[str, Any]:
    shown = asdict(node)
    return {name: shown[name] for name in ("name", "slots", "kind", "reserved_for", "given_by")}


def queue_row(jobs: Iterable[WaitingJob], trouble: str) -> dict[str, Any]:
    """Jobs with which slots come, and why no more of them are asked for."""
    return {"jobs": [asdict(job) for job in jobs], "trouble": trouble}


def interval_row(interval: SlotInterval, *, mine: bool = True) -> list[Any]:
    """Whose slot it was from when to when. ``mine``: the caller may know; else it is only known to be taken."""
    trial_id = interval.trial_id if mine else ""
    replica_id = interval.replica_id if mine else f"{interval.node} {interval.slot} {interval.began}"
    return [replica_id, trial_id, interval.node, interval.slot, interval.began, interval.ended]


def replica_row(replica: ReplicaRecord) -> dict[str, Any]:
    shown = asdict(replica)
    return {**{name: shown[name] for name in REPLICA_FIELDS}, "state": replica.state.value}


def report_row(report: Report) -> list[Any]:
    return [report.trial_id, report.step, report.value, report.progress, report.at]
