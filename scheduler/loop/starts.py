"""Starts: one replica's way from a row in the store to a process that is known."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace

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

    def start(self, trial: TrialRecord, node: NodeSlots, slot: int, index: int, replicas: int, now: float) -> bool:
        """Whether a replica has been started on this slot, or is being. ``replicas``: how many its trial is to have."""
        record = ReplicaRecord(
            replica_id=f"{trial.trial_id}-{uuid.uuid4().hex[:8]}",
            trial_id=trial.trial_id,
            node=node.node,
            slot=slot,
            launch_index=index,
            launched_at=now,
        )
        request = self._request(trial, record, node.kind, replicas)
        if not self._launcher.is_ready_for(request):
            self._journal.note_preparing(trial.trial_id)
            return False
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
        """Of replicas whose launcher could not tell at once what came of them."""
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

    def _request(self, trial: TrialRecord, replica: ReplicaRecord, node_kind: str, replicas: int) -> LaunchRequest:
        spec = trial.spec
        identity = ReplicaEnvironment(
            api_url=self._settings.api_url(),
            token=self._settings.replica_token(replica.replica_id),
            trial_id=trial.trial_id,
            replica_id=replica.replica_id,
            launch_index=replica.launch_index,
            checkpoint_dir=self._files.checkpoint_dir(trial.trial_id),
            node=replica.node,
            slot=replica.slot,
            node_kind=node_kind,
            replicas=replicas,
            server_file=self._settings.server_file,
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
            user_code=spec.user_code,
            log=self._files.log(replica),
            image=spec.image,
            package=spec.package,
            moved_to=spec.moved_to,
        )
