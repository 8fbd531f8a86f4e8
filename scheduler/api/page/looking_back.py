"""Routes for single views of the page: one trial's curves, many trials' reports, what happened, who used what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Query

from scheduler.api.client_access import Client, ClientAccess, allow, calling_client
from scheduler.api.page.rows import number_of, replica_row, trial_row
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity
from scheduler.knowledge.accounts import slot_hours_by_study
from scheduler.knowledge.profile import evenly_spread
from scheduler.knowledge.waiting import waiting_series
from trials.errors import UnknownTrial
from trials.record import Report
from trials.store.base import HistoryEntry

MOST_POINTS = 1000
"""Most points of one trial's curve."""
MOST_CURVES = 200
POINTS_OF_MANY = 200
MOST_ENTRIES = 1000
MOST_LOOKED_AT = 50_000
WAITING_BINS = 120


def looking_back_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    routes = APIRouter(prefix="/page", dependencies=[Depends(calling_client)], tags=["page"])

    def may_see(client: Identity, study: str | None) -> None:
        if client.access is not Access.STUDY:
            allow(client, read=True)
        elif study is None or study not in access.own_studies(client):
            raise HTTPException(403, f"this token is for study {client.subject!r}, not for {study!r}")

    @routes.get("/trials/{trial_id}")
    def trial(client: Client, trial_id: str) -> dict[str, Any]:
        """Return all that is kept of one trial, for its own view."""
        record = access.trial_for(client, trial_id, read=True)
        latest = store.trial_reports(trial_id)
        hints = store.hints([trial_id]).get(trial_id)
        grant = None if record.state.is_final else service.loop.decisions.grants.get(trial_id)
        replicas = store.replicas(trial_id=trial_id, live_only=False)
        outcome = record.outcome
        return {
            "trial": trial_row(
                record,
                view=service.loop.observer.latest_views.get(trial_id),
                hints=None if record.state.is_final else hints,
                latest=latest[-1] if latest else None,
                for_reader=client.access is Access.READ,
            ),
            "traceback": None if outcome is None or client.access is Access.READ else outcome.traceback or None,
            "pause_seconds": None if hints is None else hints.get("rescale_pause_seconds"),
            "reports": [_point(report) for report in evenly_spread(latest, MOST_POINTS)],
            "measurements": [
                _without_id(asdict(each)) for each in evenly_spread(store.measurements(trial_id), MOST_POINTS)
            ],
            "history": [entry_row(entry) for entry in store.history(trial_id)[-MOST_ENTRIES:]],
            "replicas": [replica_row(replica) for replica in replicas],
            "decision": None
            if grant is None
            else {
                "policy": service.loop.decisions.policy.name,
                "placement": dict(grant.placement),
                "why": grant.reason.sentence,
                "numbers": dict(grant.numbers),
            },
        }

    @routes.get("/curves")
    def curves(client: Client, trial: list[str] = Query(max_length=MOST_CURVES)) -> dict[str, list[list[Any]]]:  # noqa: B008  # as FastAPI has it
        """Return reports of several trials: step, value, progress, and when it came."""
        curves_by_trial = {}
        for trial_id in trial:
            try:
                access.trial_for(client, trial_id, read=True)
                curves_by_trial[trial_id] = [
                    _point(each) for each in evenly_spread(store.trial_reports(trial_id), POINTS_OF_MANY)
                ]
            except UnknownTrial:
                # Forgotten since the page saw it.
                continue
        return curves_by_trial

    @routes.get("/story")
    def story(
        client: Client, study: str | None = None, until: float | None = None, most: int = 200
    ) -> list[dict[str, Any]]:
        """Return what happened to all trials, or to a study's, newest first."""
        may_see(client, study)
        limit = max(1, min(most, MOST_ENTRIES))
        entries = store.recent_history(limit=limit, until=until, study=study)
        return [{"trial": entry.trial_id, **entry_row(entry)} for entry in entries]

    @routes.get("/waiting")
    def waiting(client: Client, study: str | None = None) -> dict[str, Any]:
        """Return how many trials waited for which reason, over time."""
        may_see(client, study)
        records = [record for record in access.seen_trials(client) if study is None or record.spec.study == study]
        entries = store.recent_history(limit=MOST_LOOKED_AT, study=study)
        is_cut = len(entries) == MOST_LOOKED_AT
        series = waiting_series(records, entries, service.clock(), bins=WAITING_BINS, cut=is_cut)
        return {"at": series.at, "reasons": series.reasons}

    @routes.get("/usage")
    def usage(client: Client) -> list[dict[str, Any]]:
        """Slot hours by study and day, for a price to be put on them."""
        study_by_name = {study.name: study for study in access.seen_studies(client)}
        rows = slot_hours_by_study(access.seen_trials(client), store.slot_intervals(), service.clock())
        return [
            {
                **asdict(row),
                "title": study_by_name[row.study].called if row.study in study_by_name else row.study,
                "user": study_by_name[row.study].user if row.study in study_by_name else "",
            }
            for row in rows
        ]

    @routes.get("/importance")
    def importance(client: Client, study: str) -> dict[str, Any]:
        """Return each parameter's importance for the value, from the trials that have ended."""
        may_see(client, study)
        study_asked_about = access.known_study(study)
        ended = []
        for record in access.seen_trials(client):
            if record.spec.study == study and record.outcome is not None and record.parameters:
                value = number_of(record.outcome.value) if record.outcome.kind == "value" else None
                if isinstance(value, list):
                    value = value[0]
                if value is not None:
                    ended.append((dict(record.parameters), value))
        return importance_of(ended, study_asked_about.direction)

    return routes


def entry_row(entry: HistoryEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "at": entry.at,
        "what": entry.what,
        "code": entry.reason.code,
        "why": entry.reason.sentence,
        "who": entry.who,
    }
    if entry.numbers:
        row["numbers"] = dict(entry.numbers)
    return row


def _point(report: Report) -> list[Any]:
    return [report.step, report.value, report.progress, report.at]


def _without_id(measured: dict[str, Any]) -> dict[str, Any]:
    del measured["trial_id"]
    return measured


GROUP = "elastune.importance"
"""Group of entry points that are called with finished trials' parameters and values, and the direction."""
FEWEST = 8
"""Trials; from fewer nothing can be said."""


def importance_of(ended: Sequence[tuple[Mapping[str, Any], float]], direction: str) -> dict[str, Any]:
    """Return ``{"importance": {name: part of 1}}``, or ``{"why": sentence}`` where there is none."""
    if len(ended) < FEWEST:
        return {"why": f"parameter importance needs {FEWEST} trials with a value; there are {len(ended)}"}
    evaluators = entry_points(group=GROUP)
    if not evaluators:
        return {"why": "parameter importance needs Optuna, which is not installed where the scheduler runs"}
    try:
        importance = next(iter(evaluators)).load()(ended, direction)
    except ImportError as error:
        return {"why": f"parameter importance needs Optuna, which cannot be imported where the scheduler runs: {error}"}
    except ValueError as error:
        return {"why": f"parameter importance cannot be computed: {error}"}
    return {"importance": importance}
