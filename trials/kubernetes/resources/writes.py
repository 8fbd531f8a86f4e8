"""Trials' and studies' resources as one scheduler keeps them: what is known of each, and every write to its status.

What must not be lost is in the API server before `Resources.send` returns; what can be measured or told again (hints,
reports, contacts, history, a driver's lease) is noted and follows within a second, in one patch with whatever else is
new of that trial. After a write that may or may not have got through, the resource is read anew.

Concurrency: writes to one trial are made one at a time, those to different trials side by side. Nobody who only notes
something waits for the API server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trials.errors import ClusterRefused, StoreUnavailable, UnknownTrial
from trials.kubernetes.client.api import EVENTS, STUDIES, TRIALS, ClusterApi
from trials.kubernetes.names import GROUP, VERSION, Document
from trials.kubernetes.resources import documents
from trials.kubernetes.resources.documents import TrialObject
from trials.record import TrialRecord
from trials.states import TrialState
from trials.store.base import HistoryEntry
from trials.store.memory import InMemoryTrialStore

FLUSH_SECONDS = 1.0
MOST_WRITES = 25
"""A second, of what may wait: the API server has others to serve. Of more trials each is written less often."""
LONGEST_NOTE = 1000

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Kept:
    """What is known of a trial's resource beyond its record."""

    namespace: str
    name: str
    uid: str
    template: Mapping[str, Any]
    labels: Mapping[str, str]
    finalizers: tuple[str, ...]
    created: str
    queue: str
    history_first: int
    history_length: int
    writing: threading.RLock = field(default_factory=threading.RLock)
    """Held during a write; taken after `Resources.births`, before `Resources.noting`."""
    noted: Document = field(default_factory=dict)
    """Changes to the status that have not been sent."""
    stale: bool = False
    gone_at: float | None = None
    """When its resource went; those who ask for the trial hear for a while yet how it ended."""


@dataclass(slots=True)
class KeptStudy:
    namespace: str
    name: str
    uid: str
    spec: Mapping[str, Any]
    touched: bool = False
    """Whether the lease of its driver is newer than the API server's."""


class Resources:
    """``memory`` holds the records that the resources of ``trials`` stand for; ``home``: the scheduler's namespace."""

    def __init__(self, api: ClusterApi, memory: InMemoryTrialStore, clock: Callable[[], float], *, home: str) -> None:
        self._api = api
        self._home = home
        self._memory = memory
        self._clock = clock
        self.trials: dict[str, Kept] = {}
        self.studies: dict[str, KeptStudy] = {}
        self.births = threading.RLock()
        """Held while a resource becomes known, whoever made it."""
        self.noting = threading.RLock()
        """Held while memory and what is noted change together; never during a request."""
        self._dirty: set[str] = set()
        self._events: list[tuple[str, HistoryEntry]] = []
        self._closed = threading.Event()
        self._flusher = threading.Thread(target=self._flush_often, name="cluster-writer", daemon=True)

    def start(self) -> None:
        """Send what is noted, from now on."""
        self._flusher.start()

    def close(self) -> None:
        self._closed.set()
        self._flusher.join(timeout=10.0)
        with self.noting:
            self._dirty.update(trial_id for trial_id, kept in self.trials.items() if kept.noted)
        self.flush()

    # ------------------------------------------------------------------ what is known

    def of(self, trial_id: str) -> Kept:
        try:
            return self.trials[trial_id]
        except KeyError:
            raise UnknownTrial(f"no trial is called {trial_id!r}; `elastune ls` lists them") from None

    def remember(self, found: TrialObject) -> None:
        numbers = [int(key) for key in found.history_keys]
        self.trials[found.record.trial_id] = Kept(
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
        self._memory.reload(found.record, found.replicas, found.reports, found.history, found.hints, found.measurements)

    def lost(self, trial_id: str, kept: Kept) -> None:
        """Its resource is gone: a trial that nobody has any more is cancelled."""
        with kept.writing:
            kept.gone_at = kept.gone_at or self._clock()
            record = self._memory.trial(trial_id)
            if not record.state.is_final and record.cancel_requested is None:
                self._memory.adopt(replace(record, cancel_requested="its resource was deleted"))

    # ------------------------------------------------------------------ writing at once

    def change_record(self, trial_id: str, change: Callable[[TrialRecord], TrialRecord | None]) -> bool:
        """Write what ``change`` makes of the record; nothing when it makes nothing of it."""
        kept = self.of(trial_id)
        with kept.writing:
            self._refresh(trial_id, kept)
            changed = change(self._memory.trial(trial_id))
            if changed is None:
                return False
            self.send(trial_id, documents.record_status(changed))
            # Sending it may have shown that its resource is gone.
            cancelled = changed.cancel_requested or self._memory.trial(trial_id).cancel_requested
            self._memory.adopt(replace(changed, cancel_requested=cancelled))
            return True

    def request_cancel(self, trial_id: str, why: str) -> None:
        self.change_record(trial_id, lambda present: replace(present, cancel_requested=why))

    def send(self, trial_id: str, change: Mapping[str, Any]) -> None:
        """Durable when this returns, together with what was noted. The caller holds ``writing``."""
        kept = self.of(trial_id)
        self._refresh(trial_id, kept)
        with self.noting:
            noted, kept.noted = kept.noted, {}
        whole = documents.merged(noted, change)
        if not whole or kept.gone_at is not None:
            return
        try:
            with self.sending(trial_id, kept):
                self._api.patch(TRIALS, kept.namespace, kept.name, {"status": whole}, "status")
        except BaseException:
            with self.noting:
                kept.noted = documents.merged(noted, kept.noted)
            kept.stale = True
            raise

    @contextmanager
    def sending(self, trial_id: str, kept: Kept) -> Iterator[None]:
        """A resource that is gone is no failure of the store."""
        try:
            yield
        except ClusterRefused as error:
            if not error.is_gone:
                raise StoreUnavailable(f"the API server refuses a change of trial {trial_id}: {error}") from error
            self.lost(trial_id, kept)

    def _refresh(self, trial_id: str, kept: Kept) -> None:
        if not kept.stale:
            return
        found: list[Document] = []
        with self.sending(trial_id, kept):
            found.append(self._api.get(TRIALS, kept.namespace, kept.name))
        if found:
            document = found[0]
            with self.noting:
                known = documents.merged(document.get("status") or {}, kept.noted)
                whole = {**document, "status": documents.without_nulls(known)}
                self._load(documents.trial_object(whole, trial_id, home=self._home))
        kept.stale = False

    # ------------------------------------------------------------------ writing soon

    def note(self, trial_id: str, change: Mapping[str, Any], *, soon: bool = True) -> None:
        """``soon``: whether it is sent with the next flush, or with whatever else is written of the trial."""
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        with self.noting:
            kept.noted = documents.merged(kept.noted, change)
            if soon:
                self._dirty.add(trial_id)

    def note_event(self, entry: HistoryEntry) -> None:
        with self.noting:
            self._events.append((entry.trial_id, entry))

    def show_study(self, name: str, shown: Mapping[str, Any]) -> None:
        """Fields of a study's status that are for people, or can be told again; at once, whatever comes of it."""
        kept = self.studies.get(name)
        if kept is not None:
            self._api.patch(STUDIES, kept.namespace, kept.name, {"status": dict(shown)}, "status")

    def _flush_often(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except Exception:
                logger.exception("changes not written yet")

    def flush(self) -> None:
        """Send what is noted; what fails waits on."""
        with self.noting:
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
            logger.warning("changes of a trial wait trial=%s error=%s", trial_id, error)
            with self.noting:
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
                logger.warning("a study's lease is not written yet study=%s error=%s", study.name, error)
                kept.touched = True

    def _tell_event(self, trial_id: str, entry: HistoryEntry) -> None:
        """For `kubectl describe`; lost ones are in the history all the same."""
        kept = self.trials.get(trial_id)
        if kept is None:
            return
        try:
            self._api.create(EVENTS, kept.namespace, _event(kept, entry))
        except (ClusterRefused, StoreUnavailable) as error:
            logger.info("event not told trial=%s error=%s", trial_id, error)


def _event(kept: Kept, entry: HistoryEntry) -> Document:
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
