"""Verdict on a trial whose replicas are gone without an outcome: a restart after a while, or the end.

Two budgets. Replicas that were ended from outside (killed, their node gone, out of the machine's memory) are nobody's
fault: as long as the trial gets on between two losses it is restarted without limit, and ``max_losses`` counts those
in a row without progress. A process that ended by itself, with an exit status or a fault of native code, would most
likely end so again: ``MOST_CRASHES`` in a row and the trial fails, with its last words as the reason.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from dist_core.errors import EXIT_PEER_LOST, EXIT_PREEMPTED
from trials.launch.base import NO_ROOM, Exit
from trials.record import Reason, ReplicaRecord

BACKOFF_SECONDS = 2.0
LONGEST_BACKOFF_SECONDS = 300.0
MOST_CRASHES = 4
FAULTS_OF_CODE = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS})


@dataclass(frozen=True, slots=True)
class Verdict:
    losses: int
    """Losses in a row without progress, this one included."""
    gives_up: bool
    reason: Reason
    wait_seconds: float
    """Before the next start."""


def judge(
    statuses: Set[int | None], words: str, why: str = "", *, losses: int, max_losses: int, progressed: bool
) -> Verdict:
    """Judge a loss: a restart after a while, or the end.

    ``losses``: in a row before this one. ``words``: the last line that the replicas printed, empty if none.
    ``why``: what the machine knows of their end.
    """
    losses = 1 if progressed else losses + 1
    crashed = bool(statuses) and all(is_crash(status) for status in statuses)
    most = min(MOST_CRASHES, max_losses + 1) if crashed else max_losses + 1
    how = describe(statuses) + (f", {why}" if why else "")
    said = f': "{words}"' if words and crashed else ""
    if losses >= most:
        code = "crashed" if crashed else "lost_too_often"
        times = "" if losses == 1 else f" {losses} times in a row without progress"
        rule = "" if crashed else f"; max_losses is {max_losses}"
        sentence = f"its replicas {how}{times}{said}{rule}. `elastune logs` shows their whole output"
        return Verdict(losses, True, Reason(code=code, sentence=sentence), 0.0)
    wait = min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * (2.0 ** (losses - 1) - 1.0))
    when = f" in {wait:.0f} s" if wait else ""
    sentence = f"its replicas {how}{said}; restart {losses} of {most - 1}{when}, from its last checkpoint"
    return Verdict(losses, False, Reason(code="lost", sentence=sentence), wait)


def found_no_room(ended: Sequence[ReplicaRecord], exits: Mapping[str, Exit | None]) -> bool:
    """Tell whether its replicas never ran because others have the slots, which is no loss.

    ``exits``: what the launcher said of each one's end. One that had to be stopped for the others' sake counts as them.
    """
    without = [(end := exits.get(row.replica_id)) is not None and end.code == NO_ROOM for row in ended]
    stopped = [row.stop_requested_at is not None for row in ended]
    return any(without) and all(a or b for a, b in zip(without, stopped, strict=True))


def is_crash(status: int | None) -> bool:
    """Tell whether the process ended by itself for no reason that it knew; else something outside is to blame."""
    if status in (None, EXIT_PREEMPTED, EXIT_PEER_LOST):
        return False
    return status > 0 or -status in FAULTS_OF_CODE


def describe(statuses: Set[int | None]) -> str:
    """Such as 'were killed (SIGKILL)' or 'ended with exit status 3'."""
    parts = []
    for status in sorted(statuses, key=lambda status: (status is None, status)):
        if status is None:
            parts.append("disappeared")
        elif status == -signal.SIGKILL:
            parts.append("were killed (SIGKILL: by a user, or by the kernel because memory ran out)")
        elif status == EXIT_PEER_LOST:
            parts.append("lost the connection to their peers or to the scheduler")
        elif status < 0:
            parts.append(f"were ended by {_signal_name(-status)}")
        else:
            parts.append(f"ended with exit status {status} before they returned a value")
    return " and ".join(parts) or "disappeared"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
