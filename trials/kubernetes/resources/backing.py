"""ClusterBacking: keeps a store's trials in the API server, one custom resource a trial and a study.

For the one scheduler that leads; nobody else writes a status. What must not be lost is in the API server before a write
returns; what can be measured or told again (hints, reports, contacts, history, a driver's lease) is noted and follows
within a second, in one patch with whatever else is new of that trial. After a write that may or may not have got
through, the resource is read again.

Concurrency: writes to one trial are made one at a time, those to different trials side by side. Nobody who only notes
something waits for the API server.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trials.errors import ClusterRefused, InvalidTrialSpec, StoreUnavailable, UnknownTrial
from trials.kubernetes.client.api import EVENTS, STUDIES, TRIALS, ClusterApi
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
from trials.kubernetes.resources import documents
from trials.kubernetes.resources.documents import TrialObject
from trials.kubernetes.settings import ClusterSettings
from trials.record import Measurement, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store.base import Backing, HistoryEntry
from trials.store.memory import DECIDED, TrialStore

MOST_REPORTS = 2000
"""Kept of a trial; beyond that every second of the older half goes."""
MOST_HISTORY = 500
MOST_MEASUREMENTS = 600
MOST_ENDED_REPLICAS = 200
HINTS_SECONDS = 30.0
"""Between two writes of a trial's hints where nothing else of it is written."""
FLUSH_SECONDS = 1.0
MOST_WRITES = 25
"""A second, of what may wait: the API server has others to serve. Of more trials each is written less often."""
LONGEST_NOTE = 1000

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TrialResource:
    """Facts about a trial's resource beyond its record."""

    namespace: str
    name: str
    uid: str
    template: Mapping[str, Any]
    labels: Mapping[str, str]
    finalizers: tuple[str, ...]
    created: str
    queue: str
    history: range
    """Numbers of the entries that are kept."""
    steps: list[int]
    """Steps of the reports that are kept."""
    moments: list[str]
    """Moments of the measurements that are kept."""
    ended: list[str]
    """Replicas that are gone and whose records are kept."""
    hints_sent_at: float = float("-inf")
    writing: threading.RLock = field(default_factory=threading.RLock)
    """Held during a write; taken after `births`, before `noting`."""
    noted: Document = field(default_factory=dict)
    """Changes to the status that have not been sent."""
    stale: bool = False
    gone_at: float | None = None
    """Time at which its resource went; those who ask for the trial hear for a while yet how it ended."""


@dataclass(slots=True)
class StudyResource:
    namespace: str
    name: str
    uid: str
    spec: Mapping[str, Any]
    touched: bool = False
    """True if the lease of its driver is newer than the API server's."""


class ClusterBacking(Backing):
    def __init__(self, api: ClusterApi, settings: ClusterSettings, clock: Callable[[], float]) -> None:
        super().__init__()
        self._api = api
        self._settings = settings
        self._home = settings.namespace
        self._clock = clock
        self._memory: TrialStore
        self.trials: dict[str, TrialResource] = {}
        self.studies: dict[str, StudyResource] = {}
        self.births = threading.RLock()
        """Held while a resource becomes known, whoever made it."""
        self._noting = threading.RLock()
        """Held while memory and what is noted change together; never during a request."""
        self._dirty: set[str] = set()
        self._events: list[tuple[str, HistoryEntry]] = []
        self._closed = threading.Event()
        self._flusher = threading.Thread(target=self._flush_often, name="cluster-writer", daemon=True)

    def load(self, memory: TrialStore) -> None:
        """Load nothing: what there is comes with what the watches tell (`following`)."""
        self._memory = memory

    @contextmanager
    def changing(self, trial_ids: Sequence[str] = ()) -> Iterator[None]:
        with ExitStack() as held:
            if not trial_ids:
                held.enter_context(self.births)
            for trial_id in sorted(trial_ids):
                kept = self.of(trial_id)
                held.enter_context(kept.writing)
                self._refresh(trial_id, kept)
            yield

    def noting(self) -> AbstractContextManager[object]:
        return self._noting

    def start(self) -> None:
        """Send what is noted, from now on."""
        self._flusher.start()

    def close(self) -> None:
        self._closed.set()
        self._flusher.join(timeout=10.0)
        with self._noting:
            self._dirty.update(trial_id for trial_id, kept in self.trials.items() if kept.noted)
        self.flush()

    # ------------------------------------------------------------------ what is known

    def of(self, trial_id: str) -> TrialResource:
        try:
            return self.trials[trial_id]
        except KeyError:
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them") from None

    def remember(self, trial: TrialObject) -> None:
        numbers = [int(key) for key in trial.history_keys]
        self.trials[trial.record.trial_id] = TrialResource(
            namespace=trial.namespace,
            name=trial.name,
            uid=trial.uid,
            template=trial.template,
            labels=trial.labels,
            finalizers=trial.finalizers,
            created=trial.created,
            queue=trial.queue,
            history=range(min(numbers, default=0), max(numbers, default=-1) + 1),
            steps=sorted(report.step for report in trial.reports),
            moments=[documents.moment_of(each) for each in trial.measurements],
            ended=[each.replica_id for each in trial.replicas if each.state is ReplicaState.GONE],
        )
        self._load(trial)

    def _load(self, found: TrialObject) -> None:
        """Make memory hold what the resource says."""
        self._memory.reload(found.record, found.replicas, found.reports, found.history, found.hints, found.measurements)

    def lost(self, trial_id: str, kept: TrialResource) -> None:
        """Take a trial whose resource is gone: one that nobody has any more is cancelled."""
        with kept.writing:
            kept.gone_at = kept.gone_at or self._clock()
            record = self._memory.trial(trial_id)
            self._memory.free_number(record)
            if not record.state.is_final and record.cancel_requested is None:
                self._memory.adopt(replace(record, cancel_requested="its resource was deleted"))

    # ------------------------------------------------------------------ studies

    def save_study(self, study: Study) -> Study:
        kept = self.studies.get(study.name) or self._create_study(study)
        spec = documents.study_spec(study, kept.namespace, self._home)
        if any(kept.spec.get(key) != value for key, value in spec.items()):
            changed = self._api.patch(STUDIES, kept.namespace, kept.name, {"spec": spec})
            kept.spec = changed.get("spec") or {}
        self.show_study(study.name, documents.study_status(study))
        document = {"metadata": {"namespace": kept.namespace, "name": kept.name}, "spec": spec}
        # Names of other studies are meant as they are read from the resource.
        return replace(study, terms=documents.study_from(document, home=self._home).terms)

    def _create_study(self, study: Study) -> StudyResource:
        namespace, bare = self._settings.place_of(study.name)
        objection = self._settings.objection_to(study.called, namespace)
        if objection is not None:
            raise InvalidTrialSpec(objection)
        name = study_object_name(bare)
        document = documents.study_document(study, name, namespace, self._labels(study.name), self._home)
        try:
            made = self._api.create(STUDIES, namespace, document)
        except ClusterRefused as error:
            if error.status != 409:
                raise StoreUnavailable(f"the API server refuses study {study.name!r}: {error}") from error
            made = self._api.get(STUDIES, namespace, name)
        kept = StudyResource(namespace, name, made["metadata"].get("uid", ""), made.get("spec") or {})
        self.studies[study.name] = kept
        return kept

    def _labels(self, study: str) -> dict[str, str]:
        return {STUDY_LABEL: label_value(study), INSTANCE_LABEL: label_value(self._settings.instance)}

    def save_lease(self, study: Study) -> None:
        kept = self.studies.get(study.name)
        if kept is not None:
            kept.touched = True

    def forget_study(self, name: str) -> None:
        """Do nothing: a study's resource is its users' to delete."""
        self.studies.pop(name, None)

    # ------------------------------------------------------------------ trials and replicas, at once

    def name_of(self, spec: TrialSpec) -> str:
        namespace, bare = self._settings.place_of(spec.study)
        return self._settings.name_of(namespace, trial_object_name(bare, spec.number))

    def add_trial(self, record: TrialRecord) -> TrialRecord:
        spec = record.spec
        study = self.studies.get(spec.study)
        namespace, bare = self._settings.place_of(spec.study)
        name = trial_object_name(bare, spec.number)
        document = documents.trial_document(
            spec, name, namespace, study=bare, owner=_owner_reference(study), labels=self._labels(spec.study)
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
        if (made.get("status") or {}).get("record") is None:
            made = self._api.patch(TRIALS, namespace, name, {"status": documents.record_status(record)}, "status")
        self.remember(documents.trial_object(made, record.trial_id, home=self._home))
        return self._memory.trial(record.trial_id)

    def save_trials(self, records: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
        try:
            return [self._save_trial(record) for record in records]
        except BaseException:
            for record in records:
                # Some of them may have got through, and memory has heard of none.
                self.of(record.trial_id).stale = True
            raise

    def _save_trial(self, record: TrialRecord) -> TrialRecord:
        # What users have asked for meanwhile counts.
        record = replace(record, spec=self._memory.trial(record.trial_id).spec)
        self.send(record.trial_id, documents.record_status(record))
        # Sending it may have shown that its resource is gone.
        cancelled = record.cancel_requested or self._memory.trial(record.trial_id).cancel_requested
        return replace(record, cancel_requested=cancelled)

    def forget_trials(self, trial_ids: Sequence[str]) -> None:
        for trial_id in trial_ids:
            self.remove(trial_id)
            self.trials.pop(trial_id, None)

    def remove(self, trial_id: str) -> None:
        """Take a trial out of the API server."""
        kept = self.of(trial_id)
        with self.sending(trial_id, kept):
            self._api.delete(TRIALS, kept.namespace, kept.name)

    def add_replica(self, replica: ReplicaRecord) -> None:
        self.send(replica.trial_id, {"replicaRecords": {replica.replica_id: documents.replica_status(replica)}})

    def save_replicas(self, replicas: Sequence[ReplicaRecord], fields: Sequence[str]) -> None:
        """Save replicas: a change of a state or of an aim is written at once, any other one noted."""
        for trial_id in {replica.trial_id for replica in replicas}:
            kept = self.trials.get(trial_id)
            if kept is None:
                continue
            of_trial = [replica for replica in replicas if replica.trial_id == trial_id]
            change: Document = {}
            for replica in of_trial:
                status = documents.replica_status(replica)
                change[replica.replica_id] = {name: status[name] for name in fields}
            if not DECIDED.intersection(fields):
                self.note(trial_id, {"replicaRecords": change})
                continue
            ended = [each.replica_id for each in of_trial if each.state is ReplicaState.GONE]
            too_many = (kept.ended + ended)[: max(0, len(kept.ended) + len(ended) - MOST_ENDED_REPLICAS)]
            self.send(trial_id, {"replicaRecords": {**change, **dict.fromkeys(too_many)}})
            kept.ended = (kept.ended + ended)[len(too_many) :]

    def send(self, trial_id: str, change: Mapping[str, Any]) -> None:
        """Send a change, durably, together with what was noted; the caller holds ``writing``."""
        kept = self.of(trial_id)
        self._refresh(trial_id, kept)
        with self._noting:
            noted, kept.noted = kept.noted, {}
        whole = documents.merged(noted, change)
        if not whole or kept.gone_at is not None:
            return
        try:
            with self.sending(trial_id, kept):
                self._api.patch(TRIALS, kept.namespace, kept.name, {"status": whole}, "status")
        except BaseException:
            with self._noting:
                kept.noted = documents.merged(noted, kept.noted)
            kept.stale = True
            raise

    @contextmanager
    def sending(self, trial_id: str, kept: TrialResource) -> Iterator[None]:
        """Take a resource that is gone as no failure of the store."""
        try:
            yield
        except ClusterRefused as error:
            if not error.is_gone:
                raise StoreUnavailable(f"the API server refuses a change of trial {trial_id}: {error}") from error
            self.lost(trial_id, kept)

    def _refresh(self, trial_id: str, kept: TrialResource) -> None:
        if not kept.stale:
            return
        documents_read: list[Document] = []
        with self.sending(trial_id, kept):
            documents_read.append(self._api.get(TRIALS, kept.namespace, kept.name))
        if documents_read:
            document = documents_read[0]
            with self._noting:
                known = documents.merged(document.get("status") or {}, kept.noted)
                whole = {**document, "status": documents.without_nulls(known)}
                self._load(documents.trial_object(whole, trial_id, home=self._home))
        kept.stale = False

    # ------------------------------------------------------------------ writing soon

    def note(self, trial_id: str, change: Mapping[str, Any], *, soon: bool = True) -> None:
        """Note a change to be written.

        ``soon``: with the next flush, else with whatever else is written of the trial.
        """
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        with self._noting:
            kept.noted = documents.merged(kept.noted, change)
            if soon:
                self._dirty.add(trial_id)

    def save_hints(self, trial_id: str, hints: Mapping[str, Any], measured: Measurement | None) -> None:
        """Note hints for the next write: replicas tell them twice a second, and a write is one of the whole object."""
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        now = self._clock()
        is_due = now - kept.hints_sent_at >= HINTS_SECONDS
        if is_due:
            kept.hints_sent_at = now
        change: Document = {"hints": documents.text_of(hints)}
        if measured is not None:
            gone = _make_room(kept.moments, MOST_MEASUREMENTS)
            kept.moments.append(documents.moment_of(measured))
            change["measurements"] = {**dict.fromkeys(gone), **documents.measurement_status(measured)}
        self.note(trial_id, change, soon=is_due)

    def append(self, fact: Report | HistoryEntry) -> None:
        """Note a fact to be written; a replica must not wait for an API server that is away."""
        kept = self.trials.get(fact.trial_id)
        if kept is None:
            return
        if isinstance(fact, Report):
            gone = _make_room(kept.steps, MOST_REPORTS)
            insort(kept.steps, fact.step)
            reports: Document = {str(step): None for step in gone} | {str(fact.step): documents.report_status(fact)}
            self.note(fact.trial_id, {"reports": reports})
            return
        number, first = kept.history.stop, max(kept.history.start, kept.history.stop + 1 - MOST_HISTORY)
        history: Document = {f"{gone:08d}": None for gone in range(kept.history.start, first)}
        self.note(fact.trial_id, {"history": {**history, f"{number:08d}": documents.history_status(fact)}})
        kept.history = range(first, number + 1)
        self._events.append((fact.trial_id, fact))

    def show_study(self, name: str, shown: Mapping[str, Any]) -> None:
        """Write informational fields to a study's status now, without retrying."""
        kept = self.studies.get(name)
        if kept is not None:
            self._api.patch(STUDIES, kept.namespace, kept.name, {"status": dict(shown)}, "status")

    def _flush_often(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                logger.exception("could not write changes yet")

    def flush(self) -> None:
        """Send what is noted; what fails waits on."""
        with self._noting:
            dirty, self._dirty = self._dirty, set()
            events, self._events = self._events, []
        crowd = len(dirty) > MOST_WRITES
        for trial_id in dirty:
            self._flush_trial(trial_id)
            if crowd:
                # What is noted meanwhile goes with it.
                self._closed.wait(1.0 / MOST_WRITES)
        self._flush_leases()
        for trial_id, entry in events:
            self._tell_event(trial_id, entry)

    def _flush_trial(self, trial_id: str) -> None:
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        try:
            with kept.writing:
                self.send(trial_id, {})
        except UnknownTrial:
            return
        except Exception as error:
            # The others' are written all the same.
            logger.warning("could not write changes of a trial yet trial=%s error=%s", trial_id, error)
            with self._noting:
                self._dirty.add(trial_id)

    def _flush_leases(self) -> None:
        for study in self._memory.studies():
            kept = self.studies.get(study.name)
            if kept is None or not kept.touched:
                continue
            kept.touched = False
            try:
                self.show_study(study.name, documents.study_status(study))
            except (ClusterRefused, StoreUnavailable) as error:
                logger.warning("could not write a study's lease yet study=%s error=%s", study.name, error)
                kept.touched = True

    def _tell_event(self, trial_id: str, entry: HistoryEntry) -> None:
        """Write an event for `kubectl describe`; lost ones are in the history all the same."""
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        try:
            self._api.create(EVENTS, kept.namespace, _event(kept, entry))
        except (ClusterRefused, StoreUnavailable) as error:
            logger.info("could not create an event trial=%s error=%s", trial_id, error)


def _event(kept: TrialResource, entry: HistoryEntry) -> Document:
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


def _make_room(kept: list[Any], most: int) -> list[Any]:
    """Take what goes where there is no room for one more out of a list: every second one of the older half."""
    gone = kept[: most // 2 : 2] if len(kept) >= most else []
    if gone:
        kept[: most // 2] = kept[1 : most // 2 : 2]
    return gone


def _owner_reference(study: StudyResource | None) -> Document | None:
    if study is None:
        return None
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Study", "name": study.name, "uid": study.uid}
