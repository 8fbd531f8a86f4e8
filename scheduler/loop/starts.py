"""Starts: one replica's way from a row in the store to a process that is known."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dist_core.link.environment import ReplicaEnvironment
from scheduler.loop.backoff import FAILED_JOIN_SECONDS, LAUNCH_SECONDS, Backoff
from scheduler.loop.journal import Journal
from scheduler.loop.settings import LoopSettings
from scheduler.loop.trial_files import TrialFiles
from trials.errors import LaunchFailed, StoreUnavailable
from trials.launch.base import Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.record import ReplicaRecord, ReplicaState, TrialRecord
from trials.store import TrialStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    node: NodeSlots
    slot: int


class Starts:
    def __init__(
        self,
        store: TrialStore,
        launcher: Launcher,
        journal: Journal,
        backoff: Backoff,
        files: TrialFiles,
        settings: LoopSettings,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._journal = journal
        self._backoff = backoff
        self._files = files
        self._settings = settings
        self._under_way: set[str] = set()
        """Replicas whose process is not known yet."""

    def is_under_way(self, replica_id: str) -> bool:
        return replica_id in self._under_way

    def free_places(self) -> dict[str, list[Place]]:
        """Return slots by node that nobody has, as far as is known."""
        taken = {(replica.node, replica.slot) for replica in self._store.replicas()}
        return {
            node.node: [
                Place(node, slot)
                for slot in range(node.slots)
                if (node.node, slot) not in taken and slot not in node.in_use
            ]
            for node in self._launcher.nodes()
        }

    @property
    def most_on_a_node(self) -> int:
        """Slots of the largest; replicas of more lie on several."""
        return max((node.slots for node in self._launcher.nodes()), default=1)

    def start(self, trial: TrialRecord, places: Sequence[Place], index: int, world_size: int, now: float) -> int:
        """Start a replica, a process on each of its ``places``; returns how many have been started, or are being.

        ``world_size``: how many processes its trial is to have.
        """
        records = [
            ReplicaRecord(
                replica_id=f"{trial.trial_id}-{uuid.uuid4().hex[:8]}",
                trial_id=trial.trial_id,
                node=place.node.node,
                slot=place.slot,
                job=place.node.jobs.get(place.slot, ""),
                launch_index=index + member,
                launched_at=now,
            )
            for member, place in enumerate(places)
        ]
        requests = [
            self._request(trial, record, place.node.kind, world_size, records)
            for record, place in zip(records, places, strict=True)
        ]
        if not all(self._launcher.is_ready_for(request) for request in requests):
            self._journal.note_waits_for(
                trial.trial_id, "preparing", "the modules that its replicas share are being imported"
            )
            return 0
        started = 0
        for record, request in zip(records, requests, strict=True):
            if not self._start_one(record, request, now):
                # One of them is none: those that have been started are ended when they are seen to lack it.
                break
            started += 1
        return started

    def _start_one(self, record: ReplicaRecord, request: LaunchRequest, now: float) -> bool:
        # The row comes first: a scheduler that dies in between leaves a row without a process, never the reverse.
        self._store.add_replica(record)
        try:
            process = self._launcher.launch(request)
        except LaunchFailed as error:
            self._note_not_started(record, error, now)
            return False
        if process is None:
            self._under_way.add(record.replica_id)
        else:
            self._note_process(record, process)
        return True

    def note_started(self, now: float) -> None:
        """Note replicas whose launcher could not tell at once what came of them."""
        if not self._under_way:
            return
        rows = {replica.replica_id: replica for replica in self._store.replicas()}
        for replica_id in sorted(self._under_way):
            row = rows.get(replica_id)
            try:
                process = self._launcher.started(replica_id)
            except LaunchFailed as error:
                self._under_way.discard(replica_id)
                if row is not None:
                    self._note_not_started(row, error, now)
                continue
            if process is None:
                continue
            self._under_way.discard(replica_id)
            if row is not None:
                self._note_process(row, process)
                if row.stop_requested_at is not None:
                    self._launcher.stop(replace(row, pid=process.pid, process_started=process.started), force=True)

    def _note_process(self, record: ReplicaRecord, process: ReplicaProcess) -> None:
        try:
            self._store.update_replica(record.replica_id, pid=process.pid, process_started=process.started)
        except StoreUnavailable:
            started = replace(record, pid=process.pid, process_started=process.started)
            self._launcher.stop(started, force=True)
            raise

    def _note_not_started(self, record: ReplicaRecord, error: LaunchFailed, now: float) -> None:
        logger.warning("launch failed trial=%s error=%s", record.trial_id, error)
        self._store.update_replica(record.replica_id, state=ReplicaState.GONE, gone_at=now)
        trains = bool(self._store.trial(record.trial_id).members)
        self._backoff.begin(record.trial_id, now, FAILED_JOIN_SECONDS if trains else LAUNCH_SECONDS)
        self._journal.note_launch_failed(record.trial_id, str(error), now)

    def _request(
        self,
        trial: TrialRecord,
        replica: ReplicaRecord,
        node_kind: str,
        world_size: int,
        together: Sequence[ReplicaRecord],
    ) -> LaunchRequest:
        """Compose the request to start a process; ``together``: all processes of its replica."""
        spec = trial.spec
        identity = ReplicaEnvironment(
            api_url=self._settings.api_url(),
            token=self._settings.replica_token(replica.replica_id),
            trial_id=trial.trial_id,
            replica_id=replica.replica_id,
            launch_index=replica.launch_index,
            checkpoint_dir=self._files.checkpoint_dir(trial.trial_id),
            prepared_dir=self._files.prepared_dir(spec.study),
            code_dir=self._files.code_dir,
            node=replica.node,
            slot=replica.slot,
            node_kind=node_kind,
            replicas=world_size,
            members=len(together),
            member=replica.launch_index - together[0].launch_index,
            whole=together[0].replica_id,
            layout=trial.layout,
            replica_sizes=spec.sizes if trial.layout else (),
            server_file=self._settings.server_file,
            parent=self._files.begins_with(trial),
            keeps_state=spec.keep_state,
            keeps_after=spec.keep_after,
            more_epochs=spec.more_epochs,
        )
        environ = {
            **self._settings.base_environ,
            **self._launcher.slot_environ(replica.node, replica.slot),
            **spec.environ,
            **identity.to_environ(),
        }
        return LaunchRequest(
            replica_id=replica.replica_id,
            trial_id=trial.trial_id,
            study=spec.study,
            node=replica.node,
            slot=replica.slot,
            entrypoint=spec.entrypoint,
            environ=environ,
            working_dir=spec.working_dir,
            python_path=spec.python_path,
            preload=spec.preload,
            code=spec.code,
            log=self._files.log(replica),
            image=spec.image,
            package=spec.package,
            moved_to=spec.moved_to,
        )
