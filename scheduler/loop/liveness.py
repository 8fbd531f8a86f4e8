"""Liveness of replicas: when each last called, and what becomes of those that have been silent for too long.

A process that is stopped, or stuck below Python, still exists, and its peers wait for it in vain: it is ended. One that
computes is not stuck, whatever its peers think: a long call outside of Python (a solver, a large file being parsed, a
regular expression) keeps the interpreter's lock and with it the thread that would call. Nobody waits for a replica that
is alone in its trial. Nobody is silent who could not be heard: while the scheduler was stopped or waited for its disk,
time does not count. All times but ``now`` are of a clock that does not jump.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from scheduler.loop.journal import Journal
from trials.launch.base import Exit, Launcher
from trials.record import ReplicaRecord

DEAF_SECONDS = 5.0
"""Two looks that lie further apart: the scheduler itself was held up."""
BUSY_SECONDS = 1.0
"""Seconds of CPU time in half of the silence that show a process to be at work."""
ENDED_CODE = "silent"

logger = logging.getLogger(__name__)


class Liveness:
    """Times at which replicas called last: noted by threads that serve the API, judged by the control loop."""

    def __init__(
        self, launcher: Launcher, journal: Journal, monotonic: Callable[[], float], silence_seconds: float
    ) -> None:
        self._launcher = launcher
        self._journal = journal
        self._monotonic = monotonic
        self._silence_seconds = silence_seconds
        self._heard: dict[str, float] = {}
        self._listening_since = self._looked_at = monotonic()
        self._used: dict[str, float | None] = {}
        """CPU seconds of replicas that have been silent for half of the time that they may."""
        self._left_alone: set[str] = set()
        """Replicas that are silent, and were told of."""
        self._ended: set[str] = set()

    def note(self, replica_id: str) -> None:
        self._heard[replica_id] = self._monotonic()

    def was_deaf(self) -> None:
        """Note that nobody could be heard until now."""
        self._listening_since = self._monotonic()

    def look(self) -> bool:
        """Note a look of the loop; return False when the one before lies too far back."""
        held_up = self._monotonic() - self._looked_at > DEAF_SECONDS
        if held_up:
            self.was_deaf()
        self._looked_at = self._monotonic()
        return not held_up

    def end_silent(self, replicas: Sequence[ReplicaRecord], now: float) -> None:
        """End those that have called before but not for too long, and do not compute; tell of the others once."""
        of_trial = Counter(replica.trial_id for replica in replicas)
        for replica, silent in self._silences(replicas):
            if silent <= self._silence_seconds / 2:
                self._used.pop(replica.replica_id, None)
            elif replica.replica_id not in self._used:
                self._used[replica.replica_id] = self._launcher.cpu_seconds(replica)
            if silent <= self._silence_seconds:
                continue
            # It is judged anew after as long again.
            del self._heard[replica.replica_id]
            before = self._used.pop(replica.replica_id, None)
            if of_trial[replica.trial_id] == 1:
                self._leave_alone(replica, now, "because no other replica waits for it")
            elif self._computes(replica, before):
                self._leave_alone(replica, now, "because its process is computing although others wait for it")
            else:
                self._end(replica, now)

    def _silences(self, replicas: Sequence[ReplicaRecord]) -> list[tuple[ReplicaRecord, float]]:
        """Seconds of silence of all replicas that have called before."""
        now = self._monotonic()
        alive = {replica.replica_id for replica in replicas}
        for replica_id in self._heard.keys() - alive:
            self._heard.pop(replica_id, None)
            self._used.pop(replica_id, None)
        silences = []
        for replica in replicas:
            if replica.contact_at is not None:
                # Of those that an earlier scheduler has started, too.
                self._heard.setdefault(replica.replica_id, now)
            heard = self._heard.get(replica.replica_id)
            if heard is not None:
                silences.append((replica, now - max(heard, self._listening_since)))
        return silences

    def _computes(self, replica: ReplicaRecord, before: float | None) -> bool:
        used = self._launcher.cpu_seconds(replica)
        return used is not None and before is not None and used - before >= BUSY_SECONDS

    def _end(self, replica: ReplicaRecord, now: float) -> None:
        logger.warning("replica silent trial=%s replica=%s: ending it", replica.trial_id, replica.replica_id)
        sentence = f"replica {replica.replica_id} did not call for {self._silence_seconds:.0f} s and was ended"
        self._journal.warn(replica.trial_id, ENDED_CODE, sentence, now)
        self._ended.add(replica.replica_id)
        self._launcher.stop(replica, force=True)

    def _leave_alone(self, replica: ReplicaRecord, now: float, why: str) -> None:
        if replica.replica_id in self._left_alone:
            return
        self._left_alone.add(replica.replica_id)
        sentence = (
            f"replica {replica.replica_id} has not called for {self._silence_seconds:.0f} s, and is left running, "
            f"{why}: a long call outside of Python looks like this; `elastune stop` ends the trial"
        )
        self._journal.warn(replica.trial_id, ENDED_CODE, sentence, now)

    def explain(self, gone: Exit) -> Exit:
        """Return the end with its reason where the scheduler itself has ended a silent replica."""
        self._left_alone.discard(gone.replica_id)
        was_ended = gone.replica_id in self._ended
        self._ended.discard(gone.replica_id)
        if not was_ended or gone.why:
            return gone
        why = f"the scheduler ended it, because it had not called for {self._silence_seconds:.0f} s"
        return Exit(gone.replica_id, gone.status, why, ENDED_CODE)
