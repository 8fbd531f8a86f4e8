"""The API server as trial store: one custom resource a trial, read once, then kept in memory and written through.

For the one scheduler that leads; nobody else writes a status. What must not be lost is in the API server before a call
returns; what can be measured or told again (hints, reports, contacts, history, a driver's lease) follows within a
second, in one patch with whatever else is new of that trial. After a write that may or may not have got through, the
resource is read anew.

Concurrency: any thread may call. Writes to one trial are made one at a time; those to different trials side by side.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trials.errors import ClusterRefused, InvalidStudyTerms, InvalidTrialSpec, StoreUnavailable, UnknownTrial
from trials.kubernetes import documents
from trials.kubernetes.api import EVENTS, STUDIES, TRIALS, ClusterApi
from trials.kubernetes.documents import Document, TrialObject
from trials.kubernetes.names import (
    FINALIZER,
    GROUP,
    INSTANCE_LABEL,
    LONGEST_TRIAL_NAME,
    STUDY_LABEL,
    VERSION,
    is_name,
    label_value,
    qualified,
    study_object_name,
    trial_object_name,
)
from trials.kubernetes.pods import Owner
from trials.kubernetes.settings import ClusterSettings
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import HistoryEntry, SlotInterval
from trials.store.memory import InMemoryTrialStore
from trials.terms import StudyTerms

FLUSH_SECONDS = 1.0
MOST_REPORTS = 2000
"""Kept of a trial; beyond that every second of the older half goes."""
MOST_HISTORY = 500
MOST_ENDED_REPLICAS = 200
LONGEST_NOTE = 1000
GONE_SECONDS = 600.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What is known of a resource beyond its record."""

    namespace: str
    name: str
    uid: str
    template: Mapping[str, Any]
    labels: Mapping[str, str]
    finalizers: tuple[str, ...]
    created: str
    queue: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    later: Document = field(default_factory=dict)
    """Changes to the status that have not been sent."""
    stale: bool = False
    gone_at: float | None = None
    """When its resource went; those who ask for the trial hear for a while yet how it ended."""
    history_length: int = 0
    history_first: int = 0


@dataclass(slots=True)
class _KeptStudy:
    namespace: str
    name: str
    uid: str
    spec: Mapping[str, Any]
    touched: bool = False


class KubernetesTrialStore:
    """Reads everything when made; raises StoreUnavailable when the API server does not answer."""

    def __init__(self, api: ClusterApi, settings: ClusterSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._memory = InMemoryTrialStore()
        self._kept: dict[str, _Kept] = {}
        self._kept_studies: dict[str, _KeptStudy] = {}
        self._births = threading.RLock()
        """Held while a resource becomes known, whoever made it."""
        self._dirty: set[str] = set()
        self._dirty_lock = threading.Lock()
        self._events: list[tuple[str, HistoryEntry]] = []
        self._closed = threading.Event()
        for namespace in settings.all_namespaces:
            for document in api.list(STUDIES, namespace).get("items") or ():
                self._take_contained(self.take_study, document)
            for document in sorted(api.list(TRIALS, namespace).get("items") or (), key=_submitted_at):
                self._take_contained(self.take_trial, document)
        self._flusher = threading.Thread(target=self._flush_often, name="cluster-writer", daemon=True)
        self._flusher.start()

    def close(self) -> None:
        self._closed.set()
        self._flusher.join(timeout=10.0)
        self.flush()

    # ------------------------------------------------------------------ what others write

    @staticmethod
    def _take_contained(take: Callable[[Mapping[str, Any]], bool], document: Mapping[str, Any]) -> None:
        """One resource that cannot be taken over must not keep the scheduler from looking after the others."""
        try:
            take(document)
        except ClusterRefused as error:
            metadata = document["metadata"]
            logger.error("not taken over namespace=%s name=%s: %s", metadata["namespace"], metadata["name"], error)

    def take_trial(self, document: Mapping[str, Any]) -> bool:
        """Learn of a trial from the watch: one that somebody applied, changed or deleted. Whether that was news."""
        metadata = document["metadata"]
        trial_id = qualified(metadata["namespace"], metadata["name"], self._settings.namespace)
        with self._births:
            kept = self._kept.get(trial_id)
            created = metadata.get("creationTimestamp") or ""
            if kept is not None and kept.uid != metadata.get("uid") and created < kept.created:
                # News from before that trial was deleted, and another one of its name made.
                return False
            if kept is None or kept.uid != metadata.get("uid"):
                return self._adopt(document, trial_id)
        return self._follow(document, trial_id, kept)

    def _adopt(self, document: Mapping[str, Any], trial_id: str) -> bool:
        study = (document.get("spec") or {}).get("study") or document["metadata"]["name"]
        new = ((document.get("status") or {}).get("record")) is None
        if new and (document.get("status") or {}).get("phase") == "Failed":
            # Refused before.
            return False
        name = document["metadata"]["name"]
        if new and not is_name(name):
            rule = f"at most {LONGEST_TRIAL_NAME} lower-case letters, digits and dashes"
            self._refuse(document, f"metadata.name is {name!r}; it must be {rule}")
            return False
        try:
            found = documents.trial_object(document, trial_id, self._free_number(study) if new else None)
            if new and self._has_number(found.record.spec, trial_id):
                raise InvalidTrialSpec(
                    f"spec.number is {found.record.spec.number}, which study {study!r} has already; leave it out"
                )
        except (InvalidTrialSpec, ValueError, KeyError, TypeError) as error:
            self._refuse(document, str(error))
            return False
        if new:
            found = replace(found, record=replace(found.record, submitted_at=self._clock()))
            if FINALIZER not in found.finalizers and not found.deleted:
                self._api.patch(
                    TRIALS, found.namespace, found.name, {"metadata": {"finalizers": [*found.finalizers, FINALIZER]}}
                )
                found = replace(found, finalizers=(*found.finalizers, FINALIZER))
            self._api.patch(
                TRIALS, found.namespace, found.name, {"status": documents.record_status(found.record)}, "status"
            )
        self._remember(found)
        if found.deleted and not found.record.state.is_final and found.record.cancel_requested is None:
            self.request_cancel(trial_id, "its resource was deleted")
        return True

    def _remember(self, found: TrialObject) -> None:
        trial_id = found.record.trial_id
        numbers = [int(key) for key in found.history_keys]
        self._kept[trial_id] = _Kept(
            namespace=found.namespace,
            name=found.name,
            uid=found.uid,
            template=found.template,
            labels=found.labels,
            finalizers=found.finalizers,
            created=found.created,
            queue=found.queue,
            history_first=min(numbers, default=0),
            history_length=max(numbers, default=-1) + 1,
        )
        self._load(found)

    def _load(self, found: TrialObject) -> None:
        """Make memory hold what the resource says."""
        self._memory.reload(found.record, found.replicas, found.reports, found.history, found.hints)

    def _follow(self, document: Mapping[str, Any], trial_id: str, kept: _Kept) -> bool:
        """What a user may change in a trial that is there."""
        news = False
        with kept.lock:
            record = self._memory.trial(trial_id)
            kept.finalizers = tuple(document["metadata"].get("finalizers") or ())
            if document["metadata"].get("deletionTimestamp") and record.cancel_requested is None:
                if not record.state.is_final:
                    self.request_cancel(trial_id, "its resource was deleted")
                news = True
            try:
                wanted = documents.spec_from(document, record.spec.number, scaled=True)
            except InvalidTrialSpec as error:
                logger.warning("change of a trial not followed trial=%s error=%s", trial_id, error)
                return news
            # For the pods to come; what a trial runs stays what it was.
            kept.template = (document.get("spec") or {}).get("template") or {}
            kept.queue = (document.get("spec") or {}).get("queueName") or ""
            changes = {name: getattr(wanted, name) for name in documents.CHANGEABLE}
            spec = replace(record.spec, **changes)
            if spec != record.spec:
                self._memory.adopt(replace(record, spec=spec))
                news = True
        return news

    def _refuse(self, document: Mapping[str, Any], why: str) -> None:
        metadata = document["metadata"]
        logger.warning("trial refused namespace=%s name=%s why=%s", metadata["namespace"], metadata["name"], why)
        status = {"phase": "Failed", "reason": "invalid", "message": why}
        self._api.patch(TRIALS, metadata["namespace"], metadata["name"], {"status": status}, "status")

    def _free_number(self, study: str) -> int:
        taken = {trial.spec.number for trial in self._memory.trials() if trial.spec.study == study}
        return max(taken, default=-1) + 1

    def _has_number(self, spec: TrialSpec, trial_id: str) -> bool:
        return any(
            (trial.spec.study, trial.spec.number) == (spec.study, spec.number) and trial.trial_id != trial_id
            for trial in self._memory.trials()
        )

    def forget_trial(self, document: Mapping[str, Any]) -> None:
        """Its resource is gone."""
        metadata = document["metadata"]
        trial_id = qualified(metadata["namespace"], metadata["name"], self._settings.namespace)
        with self._births:
            kept = self._kept.get(trial_id)
            if kept is not None and kept.uid == metadata.get("uid"):
                self._lost(trial_id, kept)

    def _lost(self, trial_id: str, kept: _Kept) -> None:
        kept.gone_at = kept.gone_at or self._clock()
        record = self._memory.trial(trial_id)
        if not record.state.is_final and record.cancel_requested is None:
            self._memory.adopt(replace(record, cancel_requested="its resource was deleted"))

    def forget_gone(self) -> None:
        """Let go of trials whose resources went a while ago."""
        with self._births:
            for trial_id, kept in list(self._kept.items()):
                over = self._memory.trial(trial_id).state.is_final
                if over and kept.gone_at is not None and self._clock() - kept.gone_at > GONE_SECONDS:
                    del self._kept[trial_id]
                    self._memory.forget_trial(trial_id)

    def take_study(self, document: Mapping[str, Any]) -> bool:
        """Learn of a study from the watch; whether that was news. One of two with the same name is left out."""
        metadata = document["metadata"]
        try:
            study = documents.study_from(document)
        except (InvalidStudyTerms, TypeError) as error:
            self._tell_study(metadata, f"not followed: {error}")
            return False
        with self._births:
            kept = self._kept_studies.get(study.name)
            here = (metadata["namespace"], metadata["name"])
            if kept is not None and (kept.namespace, kept.name) != here:
                self._tell_study(metadata, f"not followed: {kept.namespace}/{kept.name} has the same spec.name")
                return False
            spec = document.get("spec") or {}
            if kept is not None and kept.spec == spec and kept.uid == metadata.get("uid"):
                return False
            touched = kept is not None and kept.touched
            self._kept_studies[study.name] = _KeptStudy(*here, metadata.get("uid", ""), spec, touched)
            present = next((each for each in self._memory.studies() if each.name == study.name), None)
            if present is not None:
                # The driver's lease is newer here.
                study = replace(study, owner=present.owner, owner_seen_at=present.owner_seen_at)
            self._memory.put_study(study)
        return True

    def _tell_study(self, metadata: Mapping[str, Any], message: str) -> None:
        self._api.patch(STUDIES, metadata["namespace"], metadata["name"], {"status": {"message": message}}, "status")

    def forget_study(self, document: Mapping[str, Any]) -> None:
        name = (document.get("spec") or {}).get("name") or document["metadata"]["name"]
        with self._births:
            kept = self._kept_studies.get(name)
            if kept is not None and kept.uid == document["metadata"].get("uid"):
                del self._kept_studies[name]
                self._memory.forget_study(name)

    # ------------------------------------------------------------------ for the launcher and the operator

    def owner_of(self, trial_id: str) -> Owner:
        kept = self._of(trial_id)
        record = self._memory.trial(trial_id)
        study = self._kept_studies.get(record.spec.study)
        below = {} if study is None else study.spec
        template = below.get("template")
        return Owner(
            trial_id=trial_id,
            name=kept.name,
            namespace=kept.namespace,
            uid=kept.uid,
            study=record.spec.study,
            templates=tuple(each for each in (template, kept.template) if each),
            image=below.get("image", ""),
            preemptible=record.spec.preemptible,
            queue=kept.queue or kept.labels.get("kueue.x-k8s.io/queue-name", "") or below.get("queueName", ""),
        )

    def bound(self) -> list[TrialRecord]:
        """Trials that are over and whose resources still wait for `let_go`."""
        waiting = [trial_id for trial_id, kept in list(self._kept.items()) if FINALIZER in kept.finalizers]
        return [record for record in map(self._memory.trial, waiting) if record.state.is_final]

    def let_go(self, trial_id: str) -> None:
        """Nothing of the trial is left on the cluster: its resource may go when somebody deletes it."""
        kept = self._of(trial_id)
        left = [name for name in kept.finalizers if name != FINALIZER]
        with self._sending(trial_id, kept):
            self._api.patch(TRIALS, kept.namespace, kept.name, {"metadata": {"finalizers": left}})
        kept.finalizers = tuple(left)

    def remove(self, trial_id: str) -> None:
        """Take an ended trial out of the API server."""
        kept = self._of(trial_id)
        with self._sending(trial_id, kept):
            self._api.delete(TRIALS, kept.namespace, kept.name)

    def show(self, trial_id: str, shown: Mapping[str, Any]) -> None:
        """Fields of the status that are for people; sent with the next changes."""
        if trial_id in self._kept:
            self._later(trial_id, dict(shown))

    def show_study(self, name: str, shown: Mapping[str, Any]) -> None:
        kept = self._kept_studies.get(name)
        if kept is not None:
            self._api.patch(STUDIES, kept.namespace, kept.name, {"status": dict(shown)}, "status")

    # ------------------------------------------------------------------ writing

    def _of(self, trial_id: str) -> _Kept:
        try:
            return self._kept[trial_id]
        except KeyError:
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them") from None

    @contextmanager
    def _sending(self, trial_id: str, kept: _Kept) -> Iterator[None]:
        """A resource that is gone is no failure of the store."""
        try:
            yield
        except ClusterRefused as error:
            if error.status != 404:
                raise StoreUnavailable(f"the API server refuses a change of trial {trial_id}: {error}") from error
            self._lost(trial_id, kept)

    def _send(self, trial_id: str, change: Mapping[str, Any]) -> None:
        """Durable when this returns, together with what has been waiting. The trial's lock is held."""
        kept = self._of(trial_id)
        self._refresh(trial_id, kept)
        whole = documents.merged(kept.later, change)
        if not whole or kept.gone_at is not None:
            return
        try:
            with self._sending(trial_id, kept):
                self._api.patch(TRIALS, kept.namespace, kept.name, {"status": whole}, "status")
        except StoreUnavailable:
            kept.stale = True
            raise
        kept.later = {}

    def _refresh(self, trial_id: str, kept: _Kept) -> None:
        if not kept.stale:
            return
        found: list[Document] = []
        with self._sending(trial_id, kept):
            found.append(self._api.get(TRIALS, kept.namespace, kept.name))
        if found:
            document = found[0]
            document["status"] = documents.without_nulls(documents.merged(document.get("status") or {}, kept.later))
            self._load(documents.trial_object(document, trial_id))
        kept.stale = False

    def _later(self, trial_id: str, change: Mapping[str, Any]) -> None:
        kept = self._kept.get(trial_id)
        if kept is None:
            return
        with kept.lock:
            kept.later = documents.merged(kept.later, change)
        with self._dirty_lock:
            self._dirty.add(trial_id)

    def _flush_often(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                logger.exception("changes not written yet")

    def flush(self) -> None:
        """Send what has been waiting; what fails waits on."""
        with self._dirty_lock:
            dirty, self._dirty = self._dirty, set()
            events, self._events = self._events, []
        for trial_id in dirty:
            kept = self._kept.get(trial_id)
            if kept is None:
                continue
            try:
                with kept.lock:
                    self._send(trial_id, {})
            except UnknownTrial:
                continue
            except Exception as error:
                # The others' are written all the same.
                logger.warning("changes of a trial wait trial=%s error=%s", trial_id, error)
                with self._dirty_lock:
                    self._dirty.add(trial_id)
        for study in self._memory.studies():
            kept_study = self._kept_studies.get(study.name)
            if kept_study is None or not kept_study.touched:
                continue
            kept_study.touched = False
            try:
                self.show_study(study.name, documents.study_status(study))
            except (ClusterRefused, StoreUnavailable) as error:
                logger.warning("a study's lease is not written yet study=%s error=%s", study.name, error)
                kept_study.touched = True
        for trial_id, entry in events:
            self._tell_event(trial_id, entry)

    def _tell_event(self, trial_id: str, entry: HistoryEntry) -> None:
        """For `kubectl describe`; lost ones are in the history all the same."""
        kept = self._kept.get(trial_id)
        if kept is None:
            return
        try:
            self._api.create(EVENTS, kept.namespace, _event(kept, entry))
        except (ClusterRefused, StoreUnavailable) as error:
            logger.info("event not told trial=%s error=%s", trial_id, error)

    # ------------------------------------------------------------------ studies

    def put_study(self, study: Study) -> None:
        with self._births:
            kept = self._kept_studies.get(study.name)
            if kept is None:
                kept = self._create_study(study)
            spec = documents.study_spec(study)
            known = kept.spec
            if any(known.get(key) != value for key, value in spec.items()):
                changed = self._api.patch(STUDIES, kept.namespace, kept.name, {"spec": spec})
                known = changed.get("spec") or {}
            self._api.patch(STUDIES, kept.namespace, kept.name, {"status": documents.study_status(study)}, "status")
            kept.spec = known
            self._memory.put_study(study)

    def _create_study(self, study: Study) -> _KeptStudy:
        name, namespace = study_object_name(study.name), self._settings.namespace
        document = documents.study_document(study, name, namespace, self._labels(study.name))
        try:
            made = self._api.create(STUDIES, namespace, document)
        except ClusterRefused as error:
            if error.status != 409:
                raise StoreUnavailable(f"the API server refuses study {study.name!r}: {error}") from error
            made = self._api.get(STUDIES, namespace, name)
        kept = _KeptStudy(namespace, name, made["metadata"].get("uid", ""), made.get("spec") or {})
        self._kept_studies[study.name] = kept
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
        kept = self._kept_studies.get(name)
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
        with self._births:
            for known in self._memory.trials():
                same = (known.spec.study, known.spec.number) == (spec.study, spec.number)
                if same and self._of(known.trial_id).gone_at is None:
                    return known
            study = self._kept_studies.get(spec.study)
            namespace = self._settings.namespace if study is None else study.namespace
            name = trial_object_name(spec.study, spec.number)
            trial_id = qualified(namespace, name, self._settings.namespace)
            document = documents.trial_document(
                spec, name, namespace, owner=_owner_reference(study), labels=self._labels(spec.study)
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
                if (there.get("study"), there.get("number")) != (spec.study, spec.number):
                    raise InvalidTrialSpec(
                        f"the API server has a trial {name!r} of another study; delete it, or rename the study"
                    ) from error
            reason = Reason(code="submitted", sentence="waits for the next look at the cluster")
            record = TrialRecord(trial_id=trial_id, spec=spec, reason=reason, submitted_at=now)
            if (made.get("status") or {}).get("record") is None:
                made = self._api.patch(TRIALS, namespace, name, {"status": documents.record_status(record)}, "status")
            self._remember(documents.trial_object(made, trial_id))
            return self._memory.trial(trial_id)

    def trials(self, *, live_only: bool = False) -> list[TrialRecord]:
        return self._memory.trials(live_only=live_only)

    def trial(self, trial_id: str) -> TrialRecord:
        return self._memory.trial(trial_id)

    def _change_record(self, trial_id: str, change: Callable[[TrialRecord], TrialRecord | None]) -> bool:
        """Write what ``change`` makes of the record; nothing when it makes nothing of it."""
        kept = self._of(trial_id)
        with kept.lock:
            self._refresh(trial_id, kept)
            changed = change(self._memory.trial(trial_id))
            if changed is None:
                return False
            self._send(trial_id, documents.record_status(changed))
            # Sending it may have shown that its resource is gone.
            cancelled = changed.cancel_requested or self._memory.trial(trial_id).cancel_requested
            self._memory.adopt(replace(changed, cancel_requested=cancelled))
            return True

    def save_trial(self, record: TrialRecord) -> None:
        self._change_record(
            record.trial_id,
            lambda present: replace(
                record,
                spec=present.spec,
                entered=present.entered,
                abandoned=present.abandoned,
                outcome=present.outcome,
                cancel_requested=present.cancel_requested,
                hold=present.hold,
            ),
        )
        if record.state.is_final:
            self._memory.forget_hints(record.trial_id)

    def set_outcome(self, trial_id: str, outcome: Outcome) -> bool:
        return self._change_record(
            trial_id, lambda present: None if present.outcome is not None else replace(present, outcome=outcome)
        )

    def note_entered(self, trial_id: str, generation: int) -> None:
        self._change_record(
            trial_id, lambda present: replace(present, entered=generation) if generation > present.entered else None
        )

    def note_abandoned(self, trial_id: str, generation: int) -> None:
        self._change_record(
            trial_id,
            lambda present: replace(present, abandoned=generation) if generation > present.abandoned else None,
        )

    def request_cancel(self, trial_id: str, why: str) -> None:
        self._change_record(trial_id, lambda present: replace(present, cancel_requested=why))

    def hold_study(self, study: str, hold: str) -> None:
        for record in self._memory.trials(live_only=True):
            if record.spec.study == study and record.hold != hold:
                self._change_record(record.trial_id, lambda present: replace(present, hold=hold))

    def release(self, trial_ids: Sequence[str]) -> None:
        for trial_id in trial_ids:
            if trial_id in self._kept:
                self._change_record(
                    trial_id, lambda present: None if present.hold is None else replace(present, hold=None)
                )

    # ------------------------------------------------------------------ replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        kept = self._of(replica.trial_id)
        with kept.lock:
            self._send(replica.trial_id, {"replicaRecords": {replica.replica_id: documents.replica_status(replica)}})
            self._memory.add_replica(replica)

    def replicas(self, *, trial_id: str | None = None, live_only: bool = True) -> list[ReplicaRecord]:
        return self._memory.replicas(trial_id=trial_id, live_only=live_only)

    def update_replica(self, replica_id: str, **fields: Any) -> None:
        self._update_replicas([replica_id], fields)

    def set_replica_state(self, replica_ids: Sequence[str], state: ReplicaState) -> None:
        alive = [name for name in replica_ids if self._memory.replica_state(name) not in (None, ReplicaState.GONE)]
        self._update_replicas(alive, {"state": state})

    def _update_replicas(self, replica_ids: Sequence[str], fields: Mapping[str, Any]) -> None:
        """All of one trial. Only what a successor could not find out again has to be written at once."""
        known = [replica_id for replica_id in replica_ids if self._memory.trial_of(replica_id) is not None]
        trial_id = self._memory.trial_of(known[0]) if known else None
        kept = None if trial_id is None else self._kept.get(trial_id)
        if trial_id is None or kept is None:
            return
        written = {name: value.value if isinstance(value, ReplicaState) else value for name, value in fields.items()}
        change: Document = {"replicaRecords": {replica_id: dict(written) for replica_id in known}}
        with kept.lock:
            if fields.keys() & {"state", "join_epoch", "retry_join"}:
                if fields.get("state") is ReplicaState.GONE:
                    change["replicaRecords"] |= self._oldest_ended(trial_id)
                self._send(trial_id, change)
            else:
                self._later(trial_id, change)
            for replica_id in known:
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

    def put_hints(self, trial_id: str, hints: Mapping[str, Any]) -> None:
        self._later(trial_id, {"hints": documents.text_of(hints)})
        self._memory.put_hints(trial_id, hints)

    def hints(self, trial_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        return self._memory.hints(trial_ids)

    def add_report(self, report: Report) -> None:
        kept = self._of(report.trial_id)
        with kept.lock:
            study = self._memory.trial(report.trial_id).spec.study
            if self._memory.has_report(study, report.trial_id, report.step):
                return
            change: Document = {str(report.step): documents.report_status(report)}
            present = self._memory.steps_of(study, report.trial_id)
            if len(present) >= MOST_REPORTS:
                thinned = present[: MOST_REPORTS // 2 : 2]
                change |= {str(step): None for step in thinned}
                self._memory.forget_reports(study, report.trial_id, thinned)
            # A replica must not wait for an API server that is away: its driver has the report as well.
            self._later(report.trial_id, {"reports": change})
            self._memory.put_report(study, report)

    def reports(self, study: str) -> list[Report]:
        return self._memory.reports(study)

    def add_history(self, entry: HistoryEntry) -> None:
        kept = self._kept.get(entry.trial_id)
        if kept is None:
            return
        with kept.lock:
            number, kept.history_length = kept.history_length, kept.history_length + 1
            change: Document = {f"{number:08d}": documents.history_status(entry)}
            while kept.history_length - kept.history_first > MOST_HISTORY:
                change[f"{kept.history_first:08d}"] = None
                kept.history_first += 1
            self._later(entry.trial_id, {"history": change})
            self._memory.add_history(entry)
        with self._dirty_lock:
            self._events.append((entry.trial_id, entry))

    def history(self, trial_id: str) -> list[HistoryEntry]:
        return self._memory.history(trial_id)

    def resizes(self) -> list[HistoryEntry]:
        return self._memory.resizes()

    def slot_intervals(self) -> list[SlotInterval]:
        return self._memory.slot_intervals()


def _submitted_at(document: Mapping[str, Any]) -> float:
    """Trials without a record come last."""
    record = (document.get("status") or {}).get("record") or {}
    return float(record.get("submittedAt", float("inf")))


def _owner_reference(study: _KeptStudy | None) -> Document | None:
    if study is None:
        return None
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Study", "name": study.name, "uid": study.uid}


def _event(kept: _Kept, entry: HistoryEntry) -> Document:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.at))
    warns = entry.what in ("warning", TrialState.FAILED.value)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{kept.name}.", "namespace": kept.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Trial",
            "namespace": kept.namespace,
            "name": kept.name,
            "uid": kept.uid,
        },
        "type": "Warning" if warns else "Normal",
        "reason": "".join(part.capitalize() for part in entry.reason.code.split("_")) or "Changed",
        "message": f"{entry.what}: {entry.reason.sentence}"[:LONGEST_NOTE],
        "source": {"component": "elastune"},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
