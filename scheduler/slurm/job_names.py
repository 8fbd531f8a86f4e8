"""Names of jobs in the queue: the study that they are asked for, then the trials that run in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.snapshot import Snapshot
from trials.agents.roster import Roster
from trials.errors import SlurmRefused, SlurmUnreachable

RENAME_SECONDS = 30.0
"""Between two calls for it: names are for people, and the controller has others to serve."""
LONGEST = 60

logger = logging.getLogger(__name__)


class Renames(Protocol):
    def rename(self, jobs: Sequence[str], name: str) -> None: ...


class JobNames:
    """Gives each job in Slurm's queue the name of what runs in it.

    ``label_of``: what people call the trial of a replica.
    """

    def __init__(self, queue: Renames, roster: Roster, label_of: Callable[[str], str]) -> None:
        self._queue = queue
        self._roster = roster
        self._label_of = label_of
        self._names: dict[str, str] = {}
        """As they were given."""
        self._renamed_at = float("-inf")

    def look(self, running: Sequence[str], now: float) -> None:
        """Rename at most some jobs of one name."""
        if now - self._renamed_at < RENAME_SECONDS:
            return
        wanted = self._wanted()
        self._names = {job: name for job, name in self._names.items() if job in running}
        wrong: dict[str, list[str]] = {}
        for job in running:
            if job in wanted and wanted[job] != self._names.get(job):
                wrong.setdefault(wanted[job], []).append(job)
        if not wrong:
            return
        self._renamed_at = now
        name = max(wrong, key=lambda name: len(wrong[name]))
        try:
            self._queue.rename(wrong[name], name)
        except (SlurmRefused, SlurmUnreachable) as error:
            # Not to be tried for ever: some sites allow no changes.
            logger.info("jobs not renamed: %s", error)
        self._names |= dict.fromkeys(wrong[name], name)

    def _wanted(self) -> dict[str, str]:
        jobs = {news.agent: news.job for news in self._roster.agents()}
        labels: dict[str, set[str]] = {}
        for replica_id, agent in self._roster.running().items():
            if agent in jobs:
                labels.setdefault(jobs[agent], set()).add(self._label_of(replica_id))
        return {job: job_word("+".join(sorted(of_job))) for job, of_job in labels.items()}


def job_name(snapshot: Snapshot) -> str:
    """Return the study that jobs are for, where it is one."""
    studies = {view.study_title or view.study for view in snapshot.eligible}
    return job_word(studies.pop()) if len(studies) == 1 else "elastune"


def job_word(text: str) -> str:
    return "elastune-" + re.sub(r"[^A-Za-z0-9_.+]+", "-", text)[:LONGEST]
