"""The API server as trial store: one custom resource a trial, read once, then kept in memory and written through.

For the one scheduler that leads; nobody else writes a status. How writes get there is `writes`, what users do to
resources is `following`.

Concurrency: any thread may call. Reports, hints and history are noted without waiting for the API server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from trials.errors import ClusterRefused, InvalidTrialSpec, StoreUnavailable
from trials.kubernetes.client.api import STUDIES, TRIALS, ClusterApi
from trials.kubernetes.names import (
    FINALIZER,
    GROUP,
    INSTANCE_LABEL,
    STUDY_LABEL,
    VERSION,
    Document,
    label_value,
    study_object_name,
    trial_object_name,
)
from trials.kubernetes.owner import Owner
from trials.kubernetes.resources import documents
from trials.kubernetes.resources.following import Following
from trials.kubernetes.resources.writes import KeptStudy, Resources
from trials.kubernetes.settings import ClusterSettings
from trials.record import Measurement, Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.store.base import AIM_AGAIN, HistoryEntry, SlotInterval
from trials.store.memory import InMemoryTrialStore
from trials.terms import StudyTerms

Kept = TypeVar("Kept")

MOST_REPORTS = 2000
"""Kept of a trial; beyond that every second of the older half goes."""
MOST_HISTORY = 500
MOST_MEASUREMENTS = 600
HINTS_SECONDS = 30.0
"""Between two writes of a trial's hints where nothing else of it is written."""
MOST_ENDED_REPLICAS = 200


class KubernetesTrialStore:
    """Reads everything when made; raises StoreUnavailable when the API server does not answer.

    ``following`` is to be told what the watches tell.
    """

    def __init__(self, api: ClusterApi, settings: ClusterSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._hints_sent_at: dict[str, float] = {}
        self._memory = InMemoryTrialStore()
        self._resources = Resources(api, self._memory, clock, home=settings.namespace)
        self.following = Following(api, settings, self._memory, self._resources, clock)
        self.following.take_all()
        self._resources.start()

    def close(self) -> None:
        self._resources.close()

    def flush(self) -> None:
        """Send what has only been noted; what fails waits on."""
        self._resources.flush()

    # ------------------------------------------------------------------ for the launcher and the operator

    def owner_of(self, trial_id: str) -> Owner:
        kept = self._resources.of(trial_id)
        record = self._memory.trial(trial_id)
        below = self._below(record.spec.study)

        def last(field: str) -> str:
            return next((each[field] for each in reversed(below) if each.get(field)), "")

        return Owner(
            trial_id=trial_id,
            name=kept.name,
            namespace=kept.namespace,
            uid=kept.uid,
            study=record.spec.study,
            templates=tuple(filter(None, (*(each.get("template") for each in below), kept.template))),
            image=last("image"),
            preemptible=record.spec.preemptible,
            queue=kept.queue or kept.labels.get("kueue.x-k8s.io/queue-name", "") or last("queueName"),
        )

    def _below(self, study: str) -> list[Mapping[str, Any]]:
        """What studies say of a trial's pods: the one that was there beforehand under the title, then its own."""
        own = self._resources.studies.get(study)
        if own is None:
            return []
        title = own.spec.get("title") or ""
        called = self._resources.studies.get(self._settings.name_of(own.namespace, title))
        return [each.spec for each in (called, own) if each is not None]

    def show(self, trial_id: str, shown: Mapping[str, Any]) -> None:
        """Fields of the status that are for people; sent with the next changes."""
        self._resources.note(trial_id, shown)

    def show_study(self, name: str, shown: Mapping[str, Any]) -> None:
        self._resources.show_study(name, shown)

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        with self._resources.births:
            kept = self._resources.studies.get(study.name)
            if kept is None:
                kept = self._create_study(study)
            home = self._settings.namespace
            spec = documents.study_spec(study, kept.namespace, home)
            known = kept.spec
            if any(known.get(key) != value for key, value in spec.items()):
                changed = self._api.patch(STUDIES, kept.namespace, kept.name, {"spec": spec})
                known = changed.get("spec") or {}
            self._resources.show_study(study.name, documents.study_status(study))
            kept.spec = known
            document = {"metadata": {"namespace": kept.namespace, "name": kept.name}, "spec": spec}
            # Names of other studies are meant as they are read from the resource.
            terms = documents.study_from(document, home=home).terms
            self._memory.put_study(replace(study, terms=terms))

    def _create_study(self, study: Study) -> KeptStudy:
        namespace, bare = self._settings.place_of(study.name)
        objection = self._settings.objection_to(study.called, namespace)
        if objection is not None:
            raise InvalidTrialSpec(objection)
        name = study_object_name(bare)
        document = documents.study_document(study, name, namespace, self._labels(study.name), self._settings.namespace)
        try:
            made = self._api.create(STUDIES, namespace, document)
        except ClusterRefused as error:
            if error.status != 409:
                raise StoreUnavailable(f"the API server refuses study {study.name!r}: {error}") from error
            made = self._api.get(STUDIES, namespace, name)
        kept = KeptStudy(namespace, name, made["metadata"].get("uid", ""), made.get("spec") or {})
        self._resources.studies[study.name] = kept
        return kept

    def _labels(self, study: str) -> dict[str, str]:
        return {STUDY_LABEL: label_value(study), INSTANCE_LABEL: label_value(self._settings.instance)}

    def set_terms(self, name: str, terms: StudyTerms) -> None:
        for study in self._memory.studies():
            if study.name == name:
                self.put_study(replace(study, terms=terms))

    def touch_study(self, name: str, owner: str, now: float) -> bool:
        if not self._memory.touch_study(name, owner, now):
            return False
        kept = self._resources.studies.get(name)
        if kept is not None:
            kept.touched = True
        return True

    def disown_study(self, name: str, owner: str) -> None:
        for study in self._memory.studies():
            if study.name == name and study.owner == owner:
                self.put_study(replace(study, owner=None))

    def studies(self) -> list[Study]:
        return self._memory.studies()

    # ------------------------------------------------------------------ trials

    def submit(self, spec: TrialSpec, now: float) -> TrialRecord:
        with self._resources.births:
            for known in self._memory.trials():
                same = (known.spec.study, known.spec.number) == (spec.study, spec.number)
                if same and self._resources.of(known.trial_id).gone_at is None:
                    return known
            study = self._resources.studies.get(spec.study)
            namespace, bare = self._settings.place_of(spec.study)
            name = trial_object_name(bare, spec.number)
            trial_id = self._settings.name_of(namespace, name)
            document = documents.trial_document(
                spec,
                name,
                namespace,
                study=bare,
                owner=_owner_reference(study),
                labels=self._labels(spec.study),
            )
            document["metadata"]["finalizers"] = [FINALIZER]
            try:
                made = self._api.create(TRIALS, namespace, document)
            except ClusterRefused as error:
                if error.status != 409:
                    raise InvalidTrialSpec(f"the API server refuses the trial: {error}") from error
                # An earlier attempt got through.
                made = self._api.get(TRIALS, namespace, name)
                there = made.get("spec") or {}
                if (there.get("study"), there.get("number")) != (bare, spec.number):
                    raise InvalidTrialSpec(
                        f"the API server has a trial {name!r} of another study; delete it, or rename the study"
                    ) from error
            reason = Reason(code="submitted", sentence="waits for the next look at the cluster")
            record = TrialRecord(trial_id=trial_id, spec=spec, reason=reason, submitted_at=now)
            if (made.get("status") or {}).get("record") is None:
                made = self._api.patch(TRIALS, namespace, name, {"status": documents.record_status(record)}, "status")
            self._resources.remember(documents.trial_object(made, trial_id, home=self._settings.namespace))
            return self._memory.trial(trial_id)

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        return self._memory.trials(live_only=live_only)

    def trial(self, trial_id: str) -> TrialRecord:
        return self._memory.trial(trial_id)

    def save_trial(self, record: TrialRecord) -> None:
        self._resources.change_record(
            record.trial_id,
            lambda present: replace(record.with_facts_of(present), spec=present.spec),
        )
        if record.state.is_final:
            self._hints_sent_at.pop(record.trial_id, None)
            self._memory.forget_hints(record.trial_id)

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        return self._resources.change_record(
            trial_id, lambda present: None if present.outcome is not None else replace(present, outcome=outcome)
        )

    def note_entered(self, trial_id: str, generation: int) -> None:
        self._resources.change_record(
            trial_id, lambda present: replace(present, entered=generation) if generation > present.entered else None
        )

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        self._resources.change_record(
            trial_id,
            lambda present: replace(present, abandoned=generation) if generation > present.abandoned else None,
        )

    def request_cancel(self, trial_id: str, why: str) -> None:
        self._resources.request_cancel(trial_id, why)

    def put_parameters(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        self._resources.change_record(
            trial_id, lambda present: replace(present, parameters={**present.parameters, **parameters})
        )

    def hold(self, trial_ids: Sequence[str], why: str) -> None:
        def held(present: TrialRecord) -> TrialRecord | None:
            return None if present.state.is_final or present.hold == why else replace(present, hold=why)

        for trial_id in trial_ids:
            if trial_id in self._resources.trials:
                self._resources.change_record(trial_id, held)

    def release(self, trial_ids: Sequence[str]) -> None:
        for trial_id in trial_ids:
            if trial_id in self._resources.trials:
                self._resources.change_record(
                    trial_id, lambda present: None if present.hold is None else replace(present, hold=None)
                )

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        kept = self._resources.of(replica.trial_id)
        with kept.writing:
            self._resources.send(
                replica.trial_id, {"replicaRecords": {replica.replica_id: documents.replica_status(replica)}}
            )
            self._memory.add_replica(replica)

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        return self._memory.replicas(trial_id=trial_id, live_only=live_only)

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        self._update_replicas([replica_id], fields)

    def retry_join(self, replica_id: str, aimed: int | None) -> None:
        self._update_replicas([replica_id], AIM_AGAIN, meant=lambda name: self._memory.aims_at(name, aimed))

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        self._update_replicas(replica_ids, {"state": state})

    def _update_replicas(
        self,
        replica_ids: Sequence[str],
        fields: Mapping[str, Any],
        meant: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """All of one trial. Only what a successor could not find out again has to be written at once.

        ``meant``: which of them, asked when nobody else can write any more.
        """
        trial_id = next(filter(None, map(self._memory.trial_of, replica_ids)), None)
        kept = None if trial_id is None else self._resources.trials.get(trial_id)
        if trial_id is None or kept is None:
            return
        if not fields.keys() & {"state", "join_epoch", "retry_join", "launch_index"}:
            with self._resources.noting:
                change = self._change_of(replica_ids, fields)
                self._resources.note(trial_id, {"replicaRecords": change})
                self._update_in_memory(change, fields)
            return
        with kept.writing:
            ends = fields.get("state") is ReplicaState.GONE
            alive = [name for name in replica_ids if ends or self._memory.replica_state(name) is not ReplicaState.GONE]
            change = self._change_of([name for name in alive if meant(name)], fields)
            if not change:
                return
            ended = self._oldest_ended(trial_id) if ends else {}
            self._resources.send(trial_id, {"replicaRecords": {**change, **ended}})
            self._update_in_memory(change, fields)

    def _change_of(self, replica_ids: Sequence[str], fields: Mapping[str, Any]) -> Document:
        """Of those whose records there are: a patch must not make half a record."""
        written = {name: value.value if isinstance(value, ReplicaState) else value for name, value in fields.items()}
        return {name: dict(written) for name in replica_ids if self._memory.trial_of(name) is not None}

    def _update_in_memory(self, replica_ids: Iterable[str], fields: Mapping[str, Any]) -> None:
        for replica_id in replica_ids:
            self._memory.update_replica(replica_id, **fields)

    def _oldest_ended(self, trial_id: str) -> Document:
        """A patch that takes away what exceeds the number of ended replicas that are kept."""
        rows = self._memory.replicas(trial_id=trial_id, live_only=False)
        ended = [row.replica_id for row in rows if row.state is ReplicaState.GONE]
        too_many = ended[: max(0, len(ended) + 1 - MOST_ENDED_REPLICAS)]
        for replica_id in too_many:
            self._memory.forget_replica(replica_id)
        return dict.fromkeys(too_many)

    # ------------------------------------------------------------------ hints, reports, history

    def put_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None = None) -> None:
        """Replicas tell them twice a second, and a write is one of the whole object: they wait for another change."""
        with self._resources.noting:
            now = self._clock()
            is_due = now - self._hints_sent_at.get(trial_id, float("-inf")) >= HINTS_SECONDS
            if is_due:
                self._hints_sent_at[trial_id] = now
            change: Document = {"hints": documents.text_of(hints)}
            if measured is not None:
                change["measurements"] = {**documents.measurement_status(measured), **self._thinned(trial_id)}
            self._resources.note(trial_id, change, soon=is_due)
            self._memory.put_hints(trial_id, hints, measured)

    def _thinned(self, trial_id: str) -> Document:
        """Room for another measurement, where there is none."""
        gone = _superfluous(self._memory.measurements(trial_id), MOST_MEASUREMENTS)
        if not gone:
            return {}
        self._memory.forget_measurements(trial_id, gone)
        return {documents.moment_of(each): None for each in gone}

    def measurements(self, trial_id: str) -> list[Measurement]:
        return self._memory.measurements(trial_id)

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        return self._memory.hints(trial_ids)

    def add_report(self, report: Report) -> None:
        # A replica must not wait for an API server that is away: its driver has the report as well.
        with self._resources.noting:
            study = self._memory.trial(report.trial_id).spec.study
            if self._memory.has_report(study, report.trial_id, report.step):
                return
            change: Document = {str(report.step): documents.report_status(report)}
            thinned = _superfluous(self._memory.steps_of(study, report.trial_id), MOST_REPORTS)
            if thinned:
                change |= {str(step): None for step in thinned}
                self._memory.forget_reports(study, report.trial_id, thinned)
            self._resources.note(report.trial_id, {"reports": change})
            self._memory.put_report(study, report)

    def reports(self, study: str) -> list[Report]:
        return self._memory.reports(study)

    def trial_reports(self, trial_id: str) -> list[Report]:
        return self._memory.trial_reports(trial_id)

    def latest_reports(self, study: str) -> dict[str, Report]:
        return self._memory.latest_reports(study)

    def has_reported(self, trial_id: str) -> bool:
        return self._memory.has_reported(trial_id)

    def add_history(self, entry: HistoryEntry) -> None:
        with self._resources.noting:
            kept = self._resources.trials.get(entry.trial_id)
            if kept is None:
                return
            number, kept.history_length = kept.history_length, kept.history_length + 1
            change: Document = {f"{number:08d}": documents.history_status(entry)}
            while kept.history_length - kept.history_first > MOST_HISTORY:
                change[f"{kept.history_first:08d}"] = None
                kept.history_first += 1
            self._resources.note(entry.trial_id, {"history": change})
            self._resources.note_event(entry)
            self._memory.add_history(entry)

    def history(self, trial_id: str) -> list[HistoryEntry]:
        return self._memory.history(trial_id)

    def recent_history(self, *, limit: int, until: float | None = None, study: str | None = None) -> list[HistoryEntry]:
        return self._memory.recent_history(limit=limit, until=until, study=study)

    def resizes(self) -> list[HistoryEntry]:
        return self._memory.resizes()

    def slot_intervals(self) -> list[SlotInterval]:
        return self._memory.slot_intervals()


def _superfluous(present: Sequence[Kept], most: int) -> Sequence[Kept]:
    """What goes where there is no room for one more: every second one of the older half."""
    return present[: most // 2 : 2] if len(present) >= most else ()


def _owner_reference(study: KeptStudy | None) -> Document | None:
    if study is None:
        return None
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Study", "name": study.name, "uid": study.uid}
