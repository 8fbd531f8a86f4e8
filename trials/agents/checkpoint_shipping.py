"""Sends the newest checkpoints of a node's trials to a scheduler that shares no files with it.

The end of a replica is told when what it had saved has arrived: another node may go on from there at once.

Concurrency: a thread sends; the agent's own asks what has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from trials.agents.archives import newest
from trials.agents.shipping import Shipping

MOST_FAILURES = 5
"""Failures of one checkpoint that the scheduler cannot keep, after which it stays here."""

Send = Callable[[str, str, Path], bool | None]
"""Sends a trial's checkpoint of that name, which is in that folder: whether it is kept; None if nobody answers."""

logger = logging.getLogger(__name__)


class CheckpointShipping(Shipping):
    """Sends new checkpoints to the scheduler.

    ``folder``: where each trial has a folder for its checkpoints.
    """

    def __init__(self, folder: Path, send: Send, on_arrival: Callable[[], None]) -> None:
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
