"""TrialFiles: where the logs and checkpoints of trials lie, and how they are kept in bounds."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from trials.launch.base import Launcher
from trials.log_files import last_words, shorten
from trials.record import ReplicaRecord
from trials.store import TrialStore

LOG_SECONDS = 10.0
"""Between two looks at the size of the replicas' logs."""

logger = logging.getLogger(__name__)


class TrialFiles:
    def __init__(self, state_dir: Path, store: TrialStore, launcher: Launcher, monotonic: Callable[[], float]) -> None:
        self._state_dir = state_dir
        self._store = store
        self._launcher = launcher
        self._monotonic = monotonic
        self._logs_seen_at = monotonic()

    # ------------------------------------------------------------------ logs

    def log(self, replica: ReplicaRecord) -> Path:
        return self._logs_of(replica.trial_id) / f"{replica.replica_id}.log"

    def _logs_of(self, trial_id: str) -> Path:
        return self._state_dir / "logs" / trial_id

    def logs(self, trial_id: str) -> list[Path]:
        """What a trial's replicas printed, oldest first. Callable from any thread."""
        for replica in self._store.replicas(trial_id=trial_id):
            self.collect_log(replica)
        return sorted(self._logs_of(trial_id).glob("*.log"), key=lambda path: path.stat().st_mtime)

    def collect_log(self, replica: ReplicaRecord) -> None:
        """From where the replica ran, as far as it has printed by now."""
        self._launcher.collect_log(replica, self.log(replica))

    def last_words(self, replica: ReplicaRecord) -> str:
        return last_words(self.log(replica))

    def shorten_logs(self) -> None:
        if self._monotonic() - self._logs_seen_at < LOG_SECONDS:
            return
        self._logs_seen_at = self._monotonic()
        for replica in self._store.replicas():
            if shorten(self.log(replica)):
                logger.info("log shortened trial=%s replica=%s", replica.trial_id, replica.replica_id)

    def forget_logs(self, trial_id: str) -> None:
        """What the trial's replicas printed is not wanted any more."""
        shutil.rmtree(self._logs_of(trial_id), ignore_errors=True)

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_dir(self, trial_id: str) -> Path:
        return self._state_dir / "checkpoints" / trial_id

    def forget_checkpoints(self, trial_id: str) -> None:
        shutil.rmtree(self.checkpoint_dir(trial_id), ignore_errors=True)

    def forget_old_checkpoints(self) -> None:
        """Of trials that ended just before an earlier scheduler did."""
        for trial in self._store.trials():
            if trial.state.is_final:
                self.forget_checkpoints(trial.trial_id)
