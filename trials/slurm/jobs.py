"""Jobs of the queue on which agents run: submitted, listed, and taken back. All of them are listed by one question."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trials.slurm.commands import Slurm

FORMAT = "%i|%T|%S|%V|%N|%P|%k|%r"
"""Id, state, start (expected, where it waits), submission, nodes, partition, comment, reason."""
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
LOGS = "%A.%a.log"
"""Name for what a job prints, as `sbatch` takes it."""
LONGEST_WAIT_SECONDS = 30 * 24 * 3600.0
"""Beyond that nothing is known."""
NO_TASK = 4294967294
"""Slurm's number for the task of a job that is no array's."""
HELD = ("job requeued in held state", "JobHeldUser", "JobHeldAdmin", "BadConstraints", "launch failed requeued held")
"""Reasons of jobs that will not start before somebody does something about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    job: str
    """As `scancel` takes it: one of an array has its number behind an underscore."""
    waits: bool
    """It has not begun, or is back in the queue."""
    submitted_at: float
    starts_at: float | None
    """Time of its beginning; expected, for one that waits, as far as Slurm says."""
    nodes: str
    pool: str
    reason: str
    """Why it waits, in Slurm's words."""

    is_over: bool = False
    """It has ended, or is held up: its agent may still have its replicas save."""

    @property
    def is_held(self) -> bool:
        return self.waits and any(self.reason.startswith(each) for each in HELD)


class JobQueue:
    """Jobs in Slurm's queue that agents run in.

    ``mark``: a comment by which this scheduler's jobs are told from others. The rest describes one of them.
    """

    def __init__(
        self, slurm: Slurm, *, mark: str, options: Sequence[str], script: str, environ: Mapping[str, str]
    ) -> None:
        self._slurm = slurm
        self._mark = mark
        self._options = tuple(options)
        self._script = script
        self._environ = environ

    def try_out(self) -> None:
        """Have Slurm check such a job without submitting it; raise SlurmRefused."""
        self._slurm.run("sbatch", "--test-only", *self._options, environ=self._environ, stdin=self._script)

    def submit(self, count: int, name: str) -> str:
        """Submit ``count`` like jobs by one call; return their common id. Raises SlurmRefused, SlurmUnreachable."""
        several = [f"--array=0-{count - 1}"] if count > 1 else []
        words = [*self._options, *several, f"--job-name={name}", f"--comment={self._mark}", "--parsable"]
        return self._slurm.run("sbatch", *words, environ=self._environ, stdin=self._script).strip().partition(";")[0]

    def jobs(self) -> list[QueuedJob]:
        """Return all jobs of ours that wait or run; raise SlurmRefused or SlurmUnreachable."""
        listed = self._slurm.run("squeue", "--noheader", "--array", "--me", "--all", f"--format={FORMAT}")
        return parse_jobs(listed, self._mark)

    def rename(self, jobs: Sequence[str], name: str) -> None:
        """Rename jobs by one call."""
        self._slurm.run("scontrol", "update", f"jobid={','.join(jobs)}", f"jobname={name}")

    def cancel(self, jobs: Sequence[str], *, only_waiting: bool = False) -> None:
        """Cancel jobs; with ``only_waiting`` not those that have begun meanwhile."""
        if jobs:
            self._slurm.run("scancel", *(["--state=PENDING"] if only_waiting else []), *jobs)


LEAVING = frozenset({"COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


def log_name(job: str) -> str:
    """Return the file that ``LOGS`` stands for."""
    array, _, task = job.partition("_")
    return f"{array}.{task or NO_TASK}.log"


def parse_jobs(listed: str, mark: str) -> list[QueuedJob]:
    """Parse the mark's jobs in the queue from what `squeue` prints in ``FORMAT``."""
    jobs = []
    for line in listed.splitlines():
        parts = line.strip().split("|", 7)
        # Sites add words of their own to comments.
        if len(parts) != 8 or mark not in parts[6] or parts[1] in ENDED:
            continue
        job, state, starts, submitted, nodes, pool, _, reason = parts
        waits = state in WAITING
        since, start = _seconds(submitted) or 0.0, _seconds(starts)
        if waits and start is not None and start - since > LONGEST_WAIT_SECONDS:
            # Slurm takes jobs without a time limit to last a year.
            start = None
        jobs.append(
            QueuedJob(
                job=job,
                waits=waits,
                is_over=state in LEAVING,
                submitted_at=since,
                starts_at=start,
                nodes=nodes,
                pool=pool,
                reason=reason if waits else "",
            )
        )
    return jobs


def _seconds(text: str) -> float | None:
    """Convert a Slurm timestamp (local time) to seconds since the epoch; None if it is none."""
    if not re.match(r"\d{4}-\d\d-\d\dT", text):
        return None
    return datetime.datetime.fromisoformat(text).astimezone().timestamp()
