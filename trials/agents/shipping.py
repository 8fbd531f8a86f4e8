"""Shipping from a node to its scheduler: a thread that looks for what there is, again and again and when asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from trials.agents.archives import newest

logger = logging.getLogger(__name__)

SHIP_SECONDS = 1.0


class Shipping:
    """Concurrency: the thread calls ``ship``; whatever it shares with the agent's own is guarded by ``_lock``."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin_shipping(self) -> None:
        self._thread.start()

    def ship(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._over = True
        self._news.set()

    def _run(self) -> None:
        while not self._over:
            self._news.wait(SHIP_SECONDS)
            self._news.clear()
            self.ship()


LARGEST_PART = 256 * 1024

SendLog = Callable[[str, int, bytes], int | None]
"""Sends a part of a replica's log, which begins at that byte; how many bytes the scheduler has, None if it is away."""


class LogShipping(Shipping):
    def __init__(self, log_of: Callable[[str], Path], send: SendLog, on_arrival: Callable[[], None]) -> None:
        super().__init__("logs")
        self._log_of = log_of
        self._send = send
        self._on_arrival = on_arrival
        self._sent: dict[str, int] = {}
        self._ended: set[str] = set()
        self._fully_shipped: set[str] = set()
        """Ended, and all that they have printed has arrived."""
        self.begin_shipping()

    def begin(self, replica_id: str) -> None:
        with self._lock:
            self._sent.setdefault(replica_id, 0)

    def has_whole(self, replica_id: str) -> bool:
        """Asked when the replica has ended: whether all that it has printed has arrived."""
        with self._lock:
            if replica_id not in self._sent:
                return True
            self._ended.add(replica_id)
            whole = replica_id in self._fully_shipped
        if not whole:
            self._news.set()
        return whole

    def forget(self, replica_id: str) -> None:
        with self._lock:
            self._sent.pop(replica_id, None)
            self._ended.discard(replica_id)
            self._fully_shipped.discard(replica_id)

    def ship(self) -> None:
        with self._lock:
            open_logs = [name for name in self._sent if name not in self._fully_shipped]
        for name in open_logs:
            self._ship(name)

    def _ship(self, name: str) -> None:
        with self._lock:
            at, ended = self._sent.get(name), name in self._ended
        while at is not None:
            try:
                with open(self._log_of(name), "rb") as file:
                    file.seek(at)
                    part = file.read(LARGEST_PART)
            except OSError:
                part = b""
            if part:
                have = self._send(name, at, part)
                if have is None:
                    return
                at = have
                with self._lock:
                    if name in self._sent:
                        self._sent[name] = have
                continue
            if ended:
                with self._lock:
                    self._fully_shipped.add(name)
                self._on_arrival()
            return


MOST_FAILURES = 5
"""Failures of one checkpoint that the scheduler cannot keep, after which it stays here."""

SendCheckpoint = Callable[[str, str, Path], bool | None]
"""Sends a trial's checkpoint of that name, which is in that folder: whether it is kept; None if nobody answers."""


class CheckpointShipping(Shipping):
    """Sends new checkpoints to the scheduler.

    ``folder``: where each trial has a folder for its checkpoints.
    """

    def __init__(self, folder: Path, send: SendCheckpoint, on_arrival: Callable[[], None]) -> None:
        super().__init__("checkpoints")
        self._folder = folder
        self._send = send
        self._on_arrival = on_arrival
        self._sent: dict[tuple[str, str], str] = {}
        """Newest checkpoint of each trial and writer that has arrived, or is not going to."""
        self._failures: dict[tuple[str, str], int] = {}
        self._awaited: dict[str, dict[str, str]] = {}
        """Checkpoints that a replica's trial had here when the replica ended."""
        self.begin_shipping()

    def has_arrived(self, replica_id: str, trial_id: str) -> bool:
        """Asked when the replica has ended: whether the scheduler has what its trial had saved here by then."""
        awaited = self._awaited.get(replica_id)
        if awaited is None:
            awaited = self._awaited[replica_id] = newest(self._folder / trial_id)
        with self._lock:
            arrived = all(self._sent.get((trial_id, writer), "") >= name for writer, name in awaited.items())
        if not arrived:
            self._news.set()
        return arrived

    def forget(self, replica_id: str) -> None:
        self._awaited.pop(replica_id, None)

    def note_fetched(self, trial_id: str, name: str) -> None:
        with self._lock:
            self._sent[trial_id, name.rpartition("/")[0]] = name

    def ship(self) -> None:
        for trial in _folders_in(self._folder):
            try:
                newest_by_writer = newest(trial)
            except FileNotFoundError:
                # Its trial is over, and its folder has just been removed.
                continue
            for writer, name in newest_by_writer.items():
                self._ship(trial, writer, name)

    def _ship(self, trial: Path, writer: str, name: str) -> None:
        key = trial.name, writer
        with self._lock:
            if self._sent.get(key, "") >= name:
                return
        try:
            kept = self._send(trial.name, name, trial / name)
        except OSError as error:
            # A newer one has taken its place meanwhile.
            logger.debug("could not read a checkpoint trial=%s: %s", trial.name, error)
            return
        if kept is None:
            return
        self._failures[key] = 0 if kept else self._failures.get(key, 0) + 1
        if not kept and self._failures[key] < MOST_FAILURES:
            return
        if not kept:
            logger.warning(
                "a checkpoint stays on this node, because the scheduler did not accept it trial=%s", trial.name
            )
        with self._lock:
            self._sent[key] = name
        self._on_arrival()


def _folders_in(folder: Path) -> list[Path]:
    """Sorted; none before the first trial has saved, and none when the agent has removed its files."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
