"""Summaries of a trial: all of it, what lists show, and how it trains now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dist_core.goodput import Hints
from scheduler.api.service import Service
from trials.record import TrialRecord

BRIEF = 500
"""Characters of an error in lists."""


def summary(record: TrialRecord) -> dict[str, Any]:
    return {
        "trial_id": record.trial_id,
        "study": record.spec.study,
        "number": record.spec.number,
        "state": record.state.value,
        "reason": asdict(record.reason),
        "replicas": len(record.members) // record.slots_per_replica,
        "slots_per_replica": record.slots_per_replica,
        "layout": record.layout,
        "min_replicas": record.spec.min_replicas,
        "max_replicas": record.spec.max_replicas,
        "submitted_at": record.submitted_at,
        "finished_at": record.finished_at,
        "losses": record.losses,
        "parent": record.spec.parent,
        "outcome": asdict(record.outcome) if record.outcome is not None else None,
    }


def brief(record: TrialRecord) -> dict[str, Any]:
    """Return a trial's summary for lists: how it ended, without all that it said."""
    shown = summary(record)
    outcome = record.outcome
    if outcome is not None:
        shown["outcome"] = {
            "kind": outcome.kind,
            "value": outcome.value if outcome.kind == "value" and len(str(outcome.value)) <= BRIEF else None,
            "error_type": outcome.error_type,
            "message": outcome.message[:BRIEF],
        }
    return shown


def live(service: Service, record: TrialRecord, hints: dict[str, dict[str, Any]]) -> dict[str, Any]:
    view = service.loop.observer.latest_views.get(record.trial_id)
    document = hints.get(record.trial_id)
    live: dict[str, Any] = {
        "slots": view.held_slots if view is not None else 0,
        "promise": view.promise if view is not None else None,
    }
    if document is not None:
        known = Hints.from_json(document)
        share = known.progress / known.target_progress if known.target_progress else None
        live |= {"batch": known.global_batch, "goodput": known.goodput, "epoch": known.epoch, "share_done": share}
    return live
