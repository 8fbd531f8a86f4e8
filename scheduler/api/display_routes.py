"""Routes for live displays, pictures and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.api.client_access import Client, ClientAccess, allow, calling_client
from scheduler.api.service import Service
from scheduler.api.summaries import brief, live
from trials.record import TRIAL_ID
from trials.states import TrialState

MOST_CHANGES = 100


def display_routes(service: Service, access: ClientAccess) -> APIRouter:
    store = service.store
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.get("/metrics")
    def metrics(client: Client) -> Response:
        """Return the metrics for Prometheus."""
        allow(client, read=True)
        return Response(metrics_text(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/overview")
    def overview(client: Client, study: str | None = None) -> dict[str, Any]:
        """Return a live display's data, of one study or of all; finished trials are only counted."""
        seen = access.seen_trials(client)
        records = [record for record in seen if study is None or record.spec.study == study]
        seen_ids = {record.trial_id for record in records}
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
        changes = [entry for entry in store.resizes() if entry.trial_id in seen_ids]
        changes_shown = [asdict(entry) for entry in changes[-MOST_CHANGES:]]
        named = {
            found
            for entry in changes_shown
            for found in [entry["trial_id"], *TRIAL_ID.findall(entry["reason"]["sentence"])]
        }
        return {
            "now": service.clock(),
            "nodes": [asdict(node) for node in service.site.nodes()],
            "emulated": service.site.emulated,
            "held_slots": len(store.replicas()),
            "studies": [asdict(each) for each in access.seen_studies(client)],
            "trials": [
                {**brief(record), **live(service, record, hints), "latest": latest.get(record.trial_id)}
                for record in alive
            ],
            "over": over,
            "changes": changes_shown,
            "num_changes": len(changes),
            "named": [
                {"trial_id": record.trial_id, "study": record.spec.study, "number": record.spec.number}
                for record in seen
                if record.trial_id in named
            ],
        }

    @routes.get("/timeline")
    def timeline(client: Client) -> dict[str, Any]:
        """Return who held which slot when, and every change of size with its reason."""
        records = access.seen_trials(client)
        seen_ids = {record.trial_id for record in records}
        return {
            "now": service.clock(),
            "emulated": service.site.emulated,
            "nodes": [asdict(node) for node in service.site.nodes()],
            "studies": [{"name": study.name, "title": study.title} for study in access.seen_studies(client)],
            "intervals": [asdict(each) for each in store.slot_intervals() if each.trial_id in seen_ids],
            "trials": [brief(record) for record in records],
            "changes": [asdict(entry) for entry in store.resizes() if entry.trial_id in seen_ids],
        }

    return routes


class SchedulerMetrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        records = service.store.trials()
        replicas = service.store.replicas()
        study_of = {record.trial_id: record.spec.study for record in records}
        slots = GaugeMetricFamily("elastune_slots", "Slots of each node", labels=["node", "kind"])
        for node in service.site.nodes():
            slots.add_metric([node.name, node.kind], node.slots)
        yield slots
        held = GaugeMetricFamily("elastune_slots_held", "Slots that replicas of a study hold", labels=["node", "study"])
        holders = Counter((row.node, study_of.get(row.trial_id, "")) for row in replicas)
        for (name, study), count in sorted(holders.items()):
            held.add_metric([name, study], count)
        yield held
        trials = GaugeMetricFamily("elastune_trials", "Trials by state", labels=["study", "state"])
        states = Counter((record.spec.study, record.state.value) for record in records)
        for study in {record.spec.study for record in records}:
            for state in TrialState:
                trials.add_metric([study, state.value], states[study, state.value])
        yield trials
        views = service.loop.observer.latest_views
        promise = GaugeMetricFamily(
            "elastune_trial_promise", "Weight of a trial within its study", labels=["study", "trial"]
        )
        progress = GaugeMetricFamily(
            "elastune_trial_progress",
            "Progress of a trial, in examples at the initial batch size",
            labels=["study", "trial"],
        )
        for view in views.values():
            promise.add_metric([view.study, view.trial_id], view.promise)
            progress.add_metric([view.study, view.trial_id], view.progress)
        yield promise
        yield progress
        rescales = CounterMetricFamily("elastune_rescales", "Rescales of trials", labels=["study"])
        changes = Counter(study_of.get(entry.trial_id, "") for entry in service.store.resizes())
        for study, count in sorted(changes.items()):
            rescales.add_metric([study], count)
        yield rescales
        tick = GaugeMetricFamily("elastune_tick_seconds", "Duration of the control loop's last tick")
        tick.add_metric([], service.loop.last_tick_seconds)
        yield tick
        age = GaugeMetricFamily("elastune_loop_age_seconds", "Time since the control loop last ran")
        age.add_metric([], service.loop.age)
        yield age
        error = GaugeMetricFamily("elastune_policy_failing", "1 while the policy fails or returns invalid allocations")
        error.add_metric([], float(service.loop.decisions.error is not None))
        yield error


def metrics_text(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(service))
    return generate_latest(registry)
