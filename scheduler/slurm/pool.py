"""A pool of jobs in Slurm's queue, which follows what the trials can use.

Level-triggered: each look reads what the queue and the agents say, and moves the pool a step towards the plan. Jobs are
known by their comment, so that a scheduler that takes over finds them. The queue is asked one question for all jobs, at
most once in two seconds, and seldom where agents say themselves that nothing has changed.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from scheduler.slurm.pool_settings import PoolSettings
from scheduler.slurm.pool_size import PoolState, expected_wait, plan_pool
from scheduler.slurm.used_hours import UsedHours
from scheduler.snapshot import JobView, Snapshot
from trials.agents.roster import Roster
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.queued import QueuedSlots
from trials.slurm.agent_logs import complaint
from trials.slurm.jobs import QueuedJob, log_name

LEAST_POLL_SECONDS = 2.0
"""Between two questions to the controller, however much happens."""
WAITING_POLL_SECONDS = 5.0
"""The same while jobs wait; agents say themselves that theirs has begun."""
CALM_POLL_SECONDS = 30.0
"""The same while all jobs have agents that call."""
EXCITED_SECONDS = 15.0
"""After something has changed it is looked for more often for so long."""
PATIENCE_SECONDS = 10.0
"""Jobs that wait are taken back when nobody has wanted them for so long."""
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 600.0
WAITS_KEPT = 15
HOUR = 3600.0

logger = logging.getLogger(__name__)


class Queue(Protocol):
    """Jobs of this pool. All raise SlurmRefused or SlurmUnreachable."""

    def submit(self, count: int, name: str) -> str: ...

    def jobs(self) -> list[QueuedJob]: ...

    def cancel(self, jobs: Sequence[str], *, only_waiting: bool = False) -> None: ...


class Pool:
    """``logs``: the folder with what agents print. ``clock``: seconds since the epoch, as the queue tells times.

    One thread looks; `queued`, `jobs` and `trouble` may be read by any.
    """

    def __init__(
        self,
        queue: Queue,
        settings: PoolSettings,
        roster: Roster,
        used: UsedHours,
        *,
        logs: Path,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._roster = roster
        self._used = used
        self._logs = logs
        self._clock = clock
        self.jobs: list[QueuedJob] = []
        self.trouble = ""
        """Why no more jobs are asked for at the moment, for people."""
        self.limited_by = ""
        """Which of the user's limits holds."""
        self._polled_at = self._excited_at = float("-inf")
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._asked: deque[tuple[float, int]] = deque()
        self._idle_since: dict[str, float] = {}
        self._surplus_since: float | None = None
        self._called: set[str] = set()
        """Jobs whose agent has called."""
        self._failures = 0
        self._not_before = float("-inf")

    # ------------------------------------------------------------------ looking

    def look(self, snapshot: Snapshot | None, now: float) -> None:
        """``now``: of a clock that only goes forward."""
        try:
            self._note_agents(now)
            if now - self._polled_at >= self._poll_seconds(now):
                self._poll(now)
            if snapshot is not None:
                self._act(snapshot, now)
        except SlurmUnreachable as error:
            # What was asked may have been done: the next answer tells.
            self._excited_at = self._polled_at = now
            self._rest(str(error), now)
        except SlurmRefused as error:
            self._rest(f"Slurm refuses more jobs: {error}", now)

    def _poll_seconds(self, now: float) -> float:
        if now - self._excited_at < EXCITED_SECONDS:
            return LEAST_POLL_SECONDS
        if any(job.waits or job.job not in self._called for job in self.jobs):
            return WAITING_POLL_SECONDS
        return CALM_POLL_SECONDS

    def _poll(self, now: float) -> None:
        """Ask for all jobs at once, and see which are gone."""
        self._polled_at = now
        before = {job.job: job for job in self.jobs}
        self.jobs = self._queue.jobs()
        running = {job.job for job in self.jobs if not job.waits}
        for job in self.jobs:
            known = before.get(job.job)
            if not job.waits and known is not None and known.waits and job.starts_at is not None:
                self._waits.append(max(0.0, job.starts_at - job.submitted_at))
        for news in self._roster.agents():
            if news.job not in running:
                why = news.leaves or "it is not in the queue any more: cancelled, preempted or ended"
                self._roster.lose(news.agent, f"job {news.job} on {news.host} is gone: {why}")
        for name in before.keys() - {job.job for job in self.jobs}:
            self._note_gone(before[name], now)

    def _note_gone(self, job: QueuedJob, now: float) -> None:
        if job.job in self._called:
            self._called.discard(job.job)
            return
        # It failed, or somebody else took it back: in either case the next one had better wait.
        words = complaint(self._logs / log_name(job.job)) or "it said nothing"
        self._rest(f"job {job.job} was over before its agent could call: {words}", now)

    def _rest(self, why: str, now: float) -> None:
        """Ask for nothing for a while, longer each time."""
        self._failures += 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (self._failures - 1))
        self._not_before = now + pause
        if why != self.trouble:
            logger.warning("pool rests seconds=%.0f why=%s", pause, why)
        self.trouble = why

    def _note_agents(self, now: float) -> None:
        agents = self._roster.agents()
        called = {news.job for news in agents}
        if called - self._called:
            self._called |= called
            self._failures, self.trouble, self._excited_at = 0, "", now
        if any(not job.waits and job.job in self._called - called for job in self.jobs):
            # One that was there is gone: what has become of its job?
            self._excited_at = now
        busy = set(self._roster.running().values())
        for news in agents:
            if news.agent in busy or news.leaves:
                self._idle_since.pop(news.job, None)
            else:
                self._idle_since.setdefault(news.job, now)
        self._idle_since = {job: at for job, at in self._idle_since.items() if job in called}
        self._used.note(sum(len(news.slots) for news in agents), now)

    # ------------------------------------------------------------------ acting

    def _act(self, snapshot: Snapshot, now: float) -> None:
        while self._asked and now - self._asked[0][0] > HOUR:
            self._asked.popleft()
        state = PoolState(
            waiting=tuple(job.job for job in self.jobs if job.waits),
            running=tuple(job.job for job in self.jobs if not job.waits),
            idle=self._idle(now),
            slots_per_job=self._slots_per_job,
            waits_seconds=expected_wait(self._waits),
            used_hours=self._used.hours,
            asked_within_hour=sum(slots for _, slots in self._asked),
        )
        plan = plan_pool(snapshot, self._settings, state)
        self.limited_by = plan.limited_by
        if plan.submit and now >= self._not_before:
            self._submit(plan.submit, job_name(snapshot), now)
        self._take_back(plan.take_back, now)
        for job in plan.give_back:
            self._give_back(job)

    def _idle(self, now: float) -> tuple[str, ...]:
        found = [(at, job) for job, at in self._idle_since.items() if now - at >= self._settings.idle_seconds]
        return tuple(job for _, job in sorted(found))

    @property
    def _slots_per_job(self) -> int:
        """What agents have, once one has called; else what the options say."""
        known = [len(news.slots) for news in self._roster.agents()]
        return max(1, known[-1] if known else self._settings.slots_per_job)

    def _submit(self, count: int, name: str, now: float) -> None:
        job = self._queue.submit(count, name)
        logger.info("jobs submitted job=%s count=%d queue=%s", job, count, self._settings.where)
        self._asked.append((now, count * self._slots_per_job))
        # Until the queue is asked again: what was just asked for is not asked for twice.
        self.jobs += [
            QueuedJob(
                job=f"{job}_{index}" if count > 1 else job,
                waits=True,
                submitted_at=self._clock(),
                starts_at=None,
                nodes="",
                pool="",
                reason="",
            )
            for index in range(count)
        ]
        self._polled_at = self._excited_at = now

    def _take_back(self, jobs: Sequence[str], now: float) -> None:
        if not jobs:
            self._surplus_since = None
            return
        if self._surplus_since is None:
            self._surplus_since = now
        if now - self._surplus_since < PATIENCE_SECONDS:
            return
        logger.info("jobs taken back count=%d", len(jobs))
        self._queue.cancel(jobs, only_waiting=True)
        self.jobs = [job for job in self.jobs if job.job not in jobs]
        self._surplus_since, self._excited_at = None, now

    def _give_back(self, job: str) -> None:
        for news in self._roster.agents():
            if news.job == job and not news.leaves:
                logger.info("job given back job=%s node=%s", job, news.host)
                self._roster.dismiss(news.agent)

    def take_back_waiting(self) -> None:
        """Of the jobs that have not begun, all."""
        self._queue.cancel([job.job for job in self.jobs if job.waits], only_waiting=True)

    def end(self) -> None:
        """Leave none in the queue, as it is now."""
        self._used.save()
        self._queue.cancel([job.job for job in self._queue.jobs()])

    # ------------------------------------------------------------------ for people

    def views(self) -> tuple[JobView, ...]:
        slots = {news.job: len(news.slots) for news in self._roster.agents()}
        return tuple(
            JobView(
                job=job.job,
                queue=job.pool or self._settings.where,
                slots=slots.get(job.job, self._slots_per_job),
                waits=job.waits,
                since=job.submitted_at if job.waits else job.starts_at or job.submitted_at,
                starts_at=job.starts_at if job.waits else None,
                node=job.nodes,
                reason=job.reason,
            )
            for job in self.jobs
        )

    def queued(self) -> tuple[QueuedSlots, ...]:
        """What waits in the queue, for those who wait for it."""
        waiting = [job for job in self.jobs if job.waits]
        held = next((f"job {job.job} is held in the queue: {job.reason}" for job in waiting if job.is_held), "")
        words = self.trouble or held or (f"the pool's limit is reached: {self.limited_by}" if self.limited_by else "")
        if not waiting and not words:
            return ()
        starts = [job.starts_at for job in waiting if job.starts_at is not None]
        expected = max(0.0, min(starts) - self._clock()) if starts else expected_wait(self._waits) or None
        return (
            QueuedSlots(
                slots=sum(not job.is_held for job in waiting) * self._slots_per_job,
                where=self._settings.where,
                expected_in=expected,
                trouble=words,
            ),
        )


def job_name(snapshot: Snapshot) -> str:
    """The study that jobs are for, where it is one."""
    studies = {view.study_title or view.study for view in snapshot.eligible}
    if len(studies) != 1:
        return "elastune"
    return "elastune-" + re.sub(r"[^A-Za-z0-9_.]+", "-", studies.pop())[:40]
