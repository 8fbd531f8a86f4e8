"""What live displays, pictures and Prometheus show."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Response

from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.client_access import ClientAccess
from scheduler.api.metrics import metrics_text
from scheduler.api.service import Service
from scheduler.api.summaries import brief, live
from trials.record import TRIAL_ID

MOST_CHANGES = 100


def display_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.get("/metrics")
    def metrics(client: Client) -> Response:
        """For Prometheus."""
        allow(client, read=True)
        return Response(metrics_text(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/overview")
    def overview(client: Client, study: str | None = None) -> dict[str, Any]:
        """What a live display shows, of one study or of all: trials that are over are counted."""
        seen = access.seen_trials(client)
        records = [record for record in seen if study is None or record.spec.study == study]
        mine = {record.trial_id for record in records}
        alive = [record for record in records if not record.state.is_final]
        over: dict[str, Counter[str]] = {}
        for record in records:
            if record.state.is_final:
                over.setdefault(record.spec.study, Counter())[record.state.value] += 1
        hints = store.hints([record.trial_id for record in alive])
        latest = {
            trial_id: {"step": report.step, "value": report.value}
            for name in {record.spec.study for record in alive}
            for trial_id, report in store.latest_reports(name).items()
        }
        changes = [entry for entry in store.resizes() if entry.trial_id in mine]
        told = [asdict(entry) for entry in changes[-MOST_CHANGES:]]
        named = {
            found for entry in told for found in [entry["trial_id"], *TRIAL_ID.findall(entry["reason"]["sentence"])]
        }
        return {
            "now": service.clock(),
            "nodes": [asdict(node) for node in service.nodes()],
            "emulated": service.emulated,
            "held_slots": len(store.replicas()),
            "studies": [asdict(each) for each in access.seen_studies(client)],
            "trials": [
                {**brief(record), **live(service, record, hints), "latest": latest.get(record.trial_id)}
                for record in alive
            ],
            "over": over,
            "changes": told,
            "num_changes": len(changes),
            "named": [
                {"trial_id": record.trial_id, "study": record.spec.study, "number": record.spec.number}
                for record in seen
                if record.trial_id in named
            ],
        }

    @routes.get("/timeline")
    def timeline(client: Client) -> dict[str, Any]:
        """Who held which slot when, and every change of size with its reason."""
        records = access.seen_trials(client)
        mine = {record.trial_id for record in records}
        return {
            "now": service.clock(),
            "emulated": service.emulated,
            "nodes": [asdict(node) for node in service.nodes()],
            "studies": [{"name": study.name, "title": study.title} for study in access.seen_studies(client)],
            "intervals": [asdict(each) for each in store.slot_intervals() if each.trial_id in mine],
            "trials": [brief(record) for record in records],
            "changes": [asdict(entry) for entry in store.resizes() if entry.trial_id in mine],
        }

    return routes
