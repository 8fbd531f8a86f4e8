"""A pool of jobs in Slurm's queue, which follows what the trials can use.

Level-triggered: each look reads what the queue and the agents say, and moves the pool a step towards the plan. Jobs are
known by their comment, so that a scheduler that takes over finds them. The queue is asked one question for all jobs, at
most once in two seconds, and seldom where agents say themselves that nothing has changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from scheduler.slurm.pool_settings import PoolSettings
from scheduler.slurm.pool_size import LARGEST_ARRAY, PoolState, expected_wait, plan_pool
from scheduler.snapshot import Snapshot
from scheduler.state_folder import write_durably
from trials.agents.roster import QUIET_SECONDS, Roster
from trials.errors import SlurmRefused, SlurmUnreachable, StoreUnavailable
from trials.record import QueuedSlots, WaitingJob
from trials.slurm.commands import complaint
from trials.slurm.jobs import QueuedJob, log_name

SAVE_SECONDS = 30.0


class UsedHours:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds = 0.0
        self._noted_at: float | None = None
        self._saved_at = float("-inf")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._seconds = float(json.loads(file.read_text())["slot_seconds"])

    @property
    def hours(self) -> float:
        return self._seconds / 3600.0

    def note(self, slots: int, now: float) -> None:
        if self._noted_at is not None:
            self._seconds += slots * (now - self._noted_at)
        self._noted_at = now
        if now - self._saved_at > SAVE_SECONDS:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        try:
            write_durably(self._file, json.dumps({"slot_seconds": self._seconds}))
        except StoreUnavailable as error:
            logger.warning("slot hours not saved: %s", error)


LEAST_POLL_SECONDS = 2.0
"""Between two questions to the controller, however much happens."""
WAITING_POLL_SECONDS = 5.0
"""Shortest time between two polls of the queue while jobs wait."""
CALM_POLL_SECONDS = 30.0
"""The same while all jobs have agents that call."""
EXCITED_SECONDS = 15.0
"""After something has changed it is looked for more often for so long."""
PATIENCE_SECONDS = 60.0
"""Jobs that wait are taken back when nobody has wanted them for so long: they lose their place in the queue."""
AGENT_SECONDS = 300.0
"""A job that runs for so long without an agent that calls is taken back."""
WORRY_SECONDS = 10.0
"""An agent calls every five seconds."""
STEADY_SECONDS = 60.0
"""An agent that has called for so long shows that jobs work."""
MOST_FAILURES = 10
"""Most failures that are counted."""
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 600.0
WAITS_KEPT = 15
HOUR = 3600.0

logger = logging.getLogger(__name__)


class Queue(Protocol):
    """Queue of this pool's jobs; all methods raise SlurmRefused or SlurmUnreachable."""

    def submit(self, count: int, name: str) -> str: ...

    def jobs(self) -> list[QueuedJob]: ...

    def rename(self, jobs: Sequence[str], name: str) -> None: ...

    def cancel(self, jobs: Sequence[str], *, only_waiting: bool = False) -> None: ...


RENAME_SECONDS = 30.0
"""Between two calls for it: names are for people, and the controller has others to serve."""
LONGEST = 60


class JobNames:
    """Gives each job in Slurm's queue the name of what runs in it.

    ``label_of``: what people call the trial of a replica.
    """

    def __init__(self, queue: Queue, roster: Roster, label_of: Callable[[str], str]) -> None:
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


class Pool:
    """Pool of jobs that each bring an agent with slots.

    ``logs``: the folder with what agents print. ``clock``: seconds since the epoch, as the queue tells times.
    ``label_of``: what people call the trial of a replica.

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
        label_of: Callable[[str], str],
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._roster = roster
        self._used = used
        self._logs = logs
        self._clock = clock
        self._names = JobNames(queue, roster, label_of)
        self.jobs: list[QueuedJob] = []
        self.trouble = ""
        """Why no more jobs are asked for at the moment, for people."""
        self.limited_by = ""
        """Limit of the user's that holds."""
        self._polled_at = self._excited_at = float("-inf")
        self._is_known = False
        """True once the queue has told of its jobs."""
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._asked: deque[tuple[float, int]] = deque()
        self._idle_since: dict[str, float] = {}
        self._surplus_since: float | None = None
        self._asked_at = float("-inf")
        self._called: set[str] = set()
        """Jobs whose agent has called."""
        self._called_since: dict[str, float] = {}
        self._agentless_since: dict[str, float] = {}
        self._most_at_once = LARGEST_ARRAY
        self._failures = 0
        self._not_before = float("-inf")

    # ------------------------------------------------------------------ looking

    def look(self, snapshot: Snapshot | None, now: float) -> None:
        """Look at the queue; ``now``: of a clock that only goes forward."""
        try:
            self._note_agents(now)
            if now - self._polled_at >= self._poll_seconds(now):
                self._poll(now)
        except (SlurmUnreachable, SlurmRefused) as error:
            # Whatever squeue complains of passes; nothing is decided on what it may have said before.
            self._excited_at = now
            self._say(f"{error}; until Slurm answers, the pool stays as it is")
            self._is_known = False
        if snapshot is not None and self._is_known:
            self._act(snapshot, now)
            self._names.look([job.job for job in self.jobs if not job.waits and not job.is_over], now)

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
        jobs = self._queue.jobs()
        listed = {job.job for job in jobs}
        # Some queues show not everything: what calls is there.
        jobs += [before[job] for job in sorted(self._called & before.keys() - listed) if self._is_there(job)]
        self.jobs = jobs
        if not self._is_known:
            self._is_known = True
            self.trouble = "" if self._not_before <= now else self.trouble
        present = {job.job for job in jobs}
        for job in jobs:
            known = before.get(job.job)
            if not job.waits and known is not None and known.waits and job.starts_at is not None:
                self._waits.append(max(0.0, job.starts_at - job.submitted_at))
        for news in self._roster.agents():
            if news.job not in present and self._roster.quiet_for(news.agent) > QUIET_SECONDS:
                why = news.leaves or "it is no longer in the queue: cancelled, preempted or ended"
                self._roster.lose(news.agent, f"job {news.job} on {news.host} is gone: {why}")
        self._note_gone([before[name] for name in sorted(before.keys() - present)], now)

    def _is_there(self, job: str) -> bool:
        """Tell whether the job's agent calls, and is not about to end."""
        return any(
            news.job == job and not news.leaves and self._roster.quiet_for(news.agent) <= QUIET_SECONDS
            for news in self._roster.agents()
        )

    def _note_gone(self, gone: Sequence[QueuedJob], now: float) -> None:
        failed = [job for job in gone if job.job not in self._called]
        self._called -= {job.job for job in gone}
        if failed:
            # They failed, or somebody else took them back: in either case the next one had better wait.
            last = failed[-1]
            words = complaint(self._logs / log_name(last.job)) or "it printed nothing"
            self._rest(f"job {last.job} ended before its agent contacted the scheduler: {words}", now)

    def _rest(self, why: str, now: float) -> None:
        """Ask for nothing for a while, longer each time."""
        self._failures = min(self._failures + 1, MOST_FAILURES)
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (self._failures - 1))
        self._not_before = now + pause
        self._say(why)

    def _say(self, why: str) -> None:
        if why != self.trouble:
            logger.warning("no Slurm jobs are submitted for now: %s", why)
        self.trouble = why

    def _note_agents(self, now: float) -> None:
        agents = self._roster.agents()
        called = {news.job for news in agents}
        if called - self._called:
            self._called |= called
            self.trouble, self._excited_at = "", now
        self._called_since = {job: self._called_since.get(job, now) for job in called}
        if any(now - since > STEADY_SECONDS for since in self._called_since.values()):
            self._failures = 0
        without = {job.job for job in self.jobs if not job.waits and not job.is_over} - called
        is_quiet = any(self._roster.quiet_for(news.agent) > WORRY_SECONDS for news in agents)
        if is_quiet or without - self._agentless_since.keys():
            # One that was there is gone, or has just begun: what has become of its job?
            self._excited_at = now
        self._agentless_since = {job: self._agentless_since.get(job, now) for job in without}
        busy = set(self._roster.running().values())
        for news in agents:
            if news.agent in busy or news.leaves:
                self._idle_since.pop(news.job, None)
            else:
                self._idle_since.setdefault(news.job, now)
        self._idle_since = {job: at for job, at in self._idle_since.items() if job in called}
        there = [news for news in agents if news.agent in busy or not news.leaves]
        self._used.note(sum(len(news.slots) for news in there), now)

    # ------------------------------------------------------------------ acting

    def _act(self, snapshot: Snapshot, now: float) -> None:
        while self._asked and now - self._asked[0][0] > HOUR:
            self._asked.popleft()
        state = PoolState(
            waiting=tuple(job.job for job in self.jobs if job.waits),
            running=tuple(job.job for job in self.jobs if not job.waits and not job.is_over),
            idle=self._idle(now),
            slots_per_job=self._slots_per_job,
            waits_seconds=expected_wait(self._waits),
            used_hours=self._used.hours,
            asked_within_hour=sum(slots for _, slots in self._asked),
        )
        plan = plan_pool(snapshot, self._settings, state)
        self.limited_by = plan.limited_by
        if plan.submit and now >= max(self._not_before, self._asked_at + LEAST_POLL_SECONDS):
            self._submit(min(plan.submit, self._most_at_once), job_name(snapshot), now)
        self._take_back(plan.take_back, now)
        self._take_back_dead(now)
        for job in plan.give_back:
            self._give_back(job, plan.limited_by or "nobody needs its slots")

    def _idle(self, now: float) -> tuple[str, ...]:
        found = [(at, job) for job, at in self._idle_since.items() if now - at >= self._settings.idle_seconds]
        return tuple(job for _, job in sorted(found))

    @property
    def _slots_per_job(self) -> int:
        """Return the slots of an agent, once one has called; before that, what the options say."""
        known = [len(news.slots) for news in self._roster.agents()]
        return max(known) if known else self._settings.slots_per_job

    def _submit(self, count: int, name: str, now: float) -> None:
        self._asked_at = now
        try:
            job = self._queue.submit(count, name)
        except SlurmRefused as error:
            # A limit on jobs refuses all of them at once, also those that it would let pass.
            self._most_at_once = max(1, count // 2)
            if count > 1:
                self._say(f"Slurm refuses {count} more jobs: {error}")
            else:
                self._rest(f"Slurm refuses more jobs: {error}", now)
            return
        except SlurmUnreachable as error:
            # It may have been done all the same: the next answer tells.
            self._excited_at, self._is_known = now, False
            self._rest(str(error), now)
            return
        self._most_at_once = min(LARGEST_ARRAY, 2 * self._most_at_once)
        logger.info("jobs submitted job=%s count=%d queue=%s", job, count, self._settings.where)
        self._asked.append((now, count * max(1, self._slots_per_job)))
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
        """Take back jobs that wait and have not been wanted for a while."""
        if not jobs:
            self._surplus_since = None
            return
        if self._surplus_since is None:
            self._surplus_since = now
        if now - self._surplus_since < PATIENCE_SECONDS:
            return
        self._surplus_since, self._excited_at = now, now
        if self._cancel(jobs, only_waiting=True):
            self.jobs = [job for job in self.jobs if job.job not in jobs]

    def _take_back_dead(self, now: float) -> None:
        """Take back jobs that run, and of whose agent nothing is heard."""
        dead = [job for job, since in self._agentless_since.items() if now - since > AGENT_SECONDS]
        if dead and self._cancel(dead):
            self.jobs = [job for job in self.jobs if job.job not in dead]
            self._called -= set(dead)
            words = complaint(self._logs / log_name(dead[-1])) or "it printed nothing"
            self._rest(
                f"job {dead[-1]} ran for {AGENT_SECONDS:.0f} s, but its agent did not contact the scheduler: {words}",
                now,
            )

    def _cancel(self, jobs: Sequence[str], *, only_waiting: bool = False) -> bool:
        logger.info("cancelling jobs count=%d", len(jobs))
        try:
            self._queue.cancel(jobs, only_waiting=only_waiting)
        except (SlurmRefused, SlurmUnreachable) as error:
            logger.warning("jobs not cancelled: %s", error)
            return False
        return True

    def _give_back(self, job: str, why: str) -> None:
        for news in self._roster.agents():
            if news.job == job and not news.leaves:
                self._roster.dismiss(why, news.agent)

    def take_back_waiting(self) -> None:
        """Take back all jobs that have not begun."""
        self._queue.cancel([job.job for job in self.jobs if job.waits], only_waiting=True)

    def end(self) -> None:
        """Leave none in the queue, as it is now."""
        self._used.save()
        self._queue.cancel([job.job for job in self._queue.jobs()])

    # ------------------------------------------------------------------ for people

    @property
    def held_hours(self) -> float:
        """Slot hours that its jobs have been there for."""
        return self._used.hours

    def views(self) -> tuple[WaitingJob, ...]:
        slots = {news.job: len(news.slots) for news in self._roster.agents()}
        return tuple(
            WaitingJob(
                job=job.job,
                queue=job.pool or self._settings.where,
                slots=slots.get(job.job, max(1, self._slots_per_job)),
                waits=job.waits,
                since=job.submitted_at if job.waits else job.starts_at or job.submitted_at,
                starts_at=job.starts_at if job.waits else None,
                node=job.nodes,
                reason=job.reason,
            )
            for job in self.jobs
            if not job.is_over
        )

    def queued(self) -> tuple[QueuedSlots, ...]:
        """Return what waits in the queue, for those who wait for it."""
        waiting = [job for job in self.jobs if job.waits]
        held = next((f"job {job.job} is held in the queue: {job.reason}" for job in waiting if job.is_held), "")
        words = self.trouble or held or (f"the pool's limit is reached: {self.limited_by}" if self.limited_by else "")
        if not waiting and not words:
            return ()
        starts = [job.starts_at for job in waiting if job.starts_at is not None]
        expected = max(0.0, min(starts) - self._clock()) if starts else expected_wait(self._waits) or None
        return (
            QueuedSlots(
                slots=sum(not job.is_held for job in waiting) * max(1, self._slots_per_job),
                where=self._settings.where,
                expected_in=expected,
                trouble=words,
            ),
        )
