"""TrialFiles: where logs, checkpoints and prepared data of trials lie, and how they are kept in bounds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from dist_core.state.manifests import MANIFEST, STATE, Part, is_flushed, newest_parts, part_folder
from dist_core.state.states import ENDED, kept_after
from trials.launch.base import Launcher
from trials.log_files import last_words, shorten
from trials.record import ReplicaRecord, TrialRecord
from trials.states import TrialState
from trials.store import TrialStore

PACKAGES = "packages"
"""Folder of what sweeps have sent."""
LOG_SECONDS = 10.0
"""Between two looks at the size of the replicas' logs."""
PREPARED_SECONDS = 60.0
"""Between two looks for prepared data that no study has."""
SPARED_SECONDS = 600.0
"""Age up to which a folder may be that of a study which is about to be known."""

logger = logging.getLogger(__name__)


class TrialFiles:
    def __init__(
        self,
        state_dir: Path,
        store: TrialStore,
        launcher: Launcher,
        monotonic: Callable[[], float],
        *,
        one_machine: bool = False,
    ) -> None:
        """``one_machine``: all replicas run on this one, and read what others of it have not flushed to disk yet."""
        self._one_machine = one_machine
        self._state_dir = state_dir
        self._store = store
        self._launcher = launcher
        self._monotonic = monotonic
        self._logs_seen_at = self._prepared_seen_at = monotonic()

    # ------------------------------------------------------------------ logs

    def log(self, replica: ReplicaRecord) -> Path:
        return self._logs_of(replica.trial_id) / f"{replica.replica_id}.log"

    def _logs_of(self, trial_id: str) -> Path:
        return self._state_dir / "logs" / trial_id

    def logs(self, trial_id: str) -> list[Path]:
        """Return the logs of a trial's replicas, oldest first. Callable from any thread."""
        for replica in self._store.replicas(trial_id=trial_id):
            self.collect_log(replica)
        launched = [f"{each.replica_id}.log" for each in self._store.replicas(trial_id=trial_id, live_only=False)]
        order = {name: number for number, name in enumerate(launched)}
        return sorted(self._logs_of(trial_id).glob("*.log"), key=lambda path: (order.get(path.name, -1), path.name))

    def collect_log(self, replica: ReplicaRecord) -> None:
        """Collect a replica's log from where it ran, as far as it has printed by now."""
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
        """Forget what the trial's replicas printed."""
        shutil.rmtree(self._logs_of(trial_id), ignore_errors=True)

    # ------------------------------------------------------------------ checkpoints

    def checkpoint_dir(self, trial_id: str) -> Path:
        return self._state_dir / "checkpoints" / trial_id

    def newest_checkpoint(self, trial_id: str) -> str:
        """Return the name of a trial's newest checkpoint; empty where it has none."""
        parts = newest_parts(self.checkpoint_dir(trial_id), flushed=not self._one_machine)
        return parts[0][0].name if parts else ""

    def waits_for_state(self, trial: TrialRecord) -> bool:
        """Tell whether a trial has still to get the state of its parent."""
        return bool(trial.spec.parent) and not trial.published and not self.newest_checkpoint(trial.trial_id)

    def begins_with(self, trial: TrialRecord) -> str:
        """Return the parent whose state a trial's replicas wait for; empty where they begin anew without one."""
        anew = trial.spec.parent_epoch and not self.newest_checkpoint(trial.trial_id)
        return "" if anew else trial.spec.parent

    def has_state(self, trial_id: str) -> bool:
        return bool(self._state_of(trial_id))

    def kept_after(self, trial: TrialRecord) -> list[int]:
        """Return the epochs after which its state was kept for other trials to begin with."""
        return [epochs for epochs in trial.spec.keep_after if self._state_of(trial.trial_id, epochs)]

    def _state_of(self, trial_id: str, after: int = 0) -> list[Part]:
        """Return the parts of a trial's newest state, or of the one that it had ``after`` so many epochs."""
        folder = self.checkpoint_dir(trial_id)
        if after:
            return newest_parts(folder / kept_after(after), flushed=True)
        return newest_parts(folder / ENDED, flushed=True) or newest_parts(folder, flushed=not self._one_machine)

    def hand_on(self, child: TrialRecord) -> bool:
        """Have a child begin with its parent's state; False where there is none."""
        parent_id = child.spec.parent
        parts = self._state_of(parent_id, child.spec.parent_epoch)
        if not parts:
            return False
        try:
            _take_over(parts, self.checkpoint_dir(child.trial_id), parent_id)
        except FileNotFoundError as error:
            # The parent has written newer ones meanwhile, and removed this one.
            logger.info("state not handed on parent=%s child=%s reason=%s", parent_id, child.trial_id, error)
            return False
        logger.info("state handed on parent=%s child=%s checkpoint=%s", parent_id, child.trial_id, parts[0][0].name)
        return True

    def forget_checkpoints(self, trial_id: str) -> None:
        """Forget a trial's checkpoints, once the trials that begin where it stands have theirs."""
        for child in self._store.trials(live_only=True):
            if child.spec.parent == trial_id and self.waits_for_state(child):
                self.hand_on(child)
        shutil.rmtree(self.checkpoint_dir(trial_id), ignore_errors=True)

    def settle(self, trial: TrialRecord, ended_as: TrialState) -> None:
        """Forget the checkpoints of a trial that has ended, unless its state is to be kept and it ended well.

        Those that it had to keep on its way stay: trials that are still to come may begin with them.
        """
        if trial.spec.keep_state and ended_as in (TrialState.SUCCEEDED, TrialState.PRUNED):
            return
        kept = {kept_after(epochs) for epochs in self.kept_after(trial)}
        if not kept:
            self.forget_checkpoints(trial.trial_id)
            return
        for written in self.checkpoint_dir(trial.trial_id).iterdir():
            if written.name not in kept:
                shutil.rmtree(written, ignore_errors=True)

    def settle_ended(self) -> None:
        """Settle trials that ended just before an earlier scheduler did."""
        for trial in self._store.trials():
            if trial.state.is_final:
                self.settle(trial, trial.state)

    # ------------------------------------------------------------------ code and prepared data

    @property
    def code_dir(self) -> Path:
        """Return the folder with what sweeps have sent, for replicas that share the scheduler's files."""
        return self._state_dir / PACKAGES

    def prepared_dir(self, study: str) -> Path:
        """Return the folder of a study's prepared data, for all its trials."""
        shown = re.sub(r"[^A-Za-z0-9._-]+", "-", study)[:40]
        return self._state_dir / "prepared" / f"{shown}-{hashlib.sha256(study.encode()).hexdigest()[:12]}"

    def forget_prepared(self) -> None:
        """Forget prepared data of studies that nobody knows any more."""
        if self._monotonic() - self._prepared_seen_at < PREPARED_SECONDS:
            return
        self._prepared_seen_at = self._monotonic()
        home = self._state_dir / "prepared"
        if not home.is_dir():
            return
        names = {study.name for study in self._store.studies()} | {trial.spec.study for trial in self._store.trials()}
        kept = {self.prepared_dir(name) for name in names}
        for folder in home.iterdir():
            if folder not in kept and time.time() - folder.stat().st_mtime > SPARED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("prepared data deleted folder=%s", folder.name)


def _take_over(parts: list[Part], folder: Path, parent_id: str) -> None:
    """Make a checkpoint of a parent the first one of its child, the first process's last: then it counts.

    Links where the file system has them: a state of gigabytes takes neither time nor space. Raises FileNotFoundError
    where a state is gone, and leaves nothing then that would count.
    """
    for member, (source, manifest) in reversed(list(enumerate(parts))):
        target = part_folder(folder, member)
        arriving = target / f"partial-{uuid.uuid4().hex[:12]}"
        arriving.mkdir(parents=True)
        try:
            _link_or_copy(source / STATE, arriving / STATE)
        except FileNotFoundError:
            shutil.rmtree(arriving, ignore_errors=True)
            raise
        manifest = {**manifest, "summary": {**manifest["summary"], "left": True, "parent": parent_id}}
        with open(arriving / MANIFEST, "w") as file:
            json.dump(manifest, file)
            if is_flushed(manifest):
                file.flush()
                os.fsync(file.fileno())
            # Else the child flushes it: here that would wait for the parent's state, which is on its way to the disk.
        first = target / f"checkpoint-{1:08d}"
        # Of an attempt that was cut short between two parts.
        shutil.rmtree(first, ignore_errors=True)
        os.rename(arriving, first)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
