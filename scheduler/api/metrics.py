"""What a monitoring system asks for, in Prometheus's text format: made anew at each question from the present state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.api.service import Service
from trials.states import TrialState


class SchedulerMetrics(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        records = service.store.trials()
        replicas = service.store.replicas()
        study_of = {record.trial_id: record.spec.study for record in records}
        slots = GaugeMetricFamily("elastune_slots", "Slots of each node", labels=["node", "kind"])
        for node in service.nodes():
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
        views = service.loop.latest_views
        promise = GaugeMetricFamily(
            "elastune_trial_promise", "Weight of a trial within its study", labels=["study", "trial"]
        )
        progress = GaugeMetricFamily(
            "elastune_trial_progress", "Examples at the initial batch size", labels=["study", "trial"]
        )
        for view in views.values():
            promise.add_metric([view.study, view.trial_id], view.promise)
            progress.add_metric([view.study, view.trial_id], view.progress)
        yield promise
        yield progress
        rescales = CounterMetricFamily("elastune_rescales", "Changes of size of trials", labels=["study"])
        changes = Counter(study_of.get(entry.trial_id, "") for entry in service.store.resizes())
        for study, count in sorted(changes.items()):
            rescales.add_metric([study], count)
        yield rescales
        tick = GaugeMetricFamily("elastune_tick_seconds", "How long the last look at everything took")
        tick.add_metric([], service.loop.last_tick_seconds)
        yield tick
        age = GaugeMetricFamily("elastune_loop_age_seconds", "Time since the control loop last came round")
        age.add_metric([], service.loop.age)
        yield age
        error = GaugeMetricFamily("elastune_policy_failing", "1 while the policy's answers cannot be used")
        error.add_metric([], float(service.loop.decisions.error is not None))
        yield error


def metrics_text(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(service))
    return generate_latest(registry)
