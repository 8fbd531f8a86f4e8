"""Slots that Slurm gives on demand: a pool of jobs, and the agents in them.

Concurrency: a thread of its own looks after the pool, because Slurm may take its time to answer; the control loop waits
for nobody.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.errors import SchedulerError
from scheduler.loop.control_loop import ControlLoop
from scheduler.slurm.agents import AgentSettings, AgentSite
from scheduler.slurm.pool import Pool, UsedHours
from scheduler.slurm.pool_settings import PoolSettings
from trials.agents.launcher import AgentLauncher
from trials.agents.roster import Roster
from trials.agents.words import AGENT_VARIABLE
from trials.errors import SlurmRefused, SlurmUnreachable, StoreUnavailable, UnknownTrial
from trials.record import QueuedSlots, WaitingJob
from trials.slurm.commands import PATIENCE_SECONDS, Slurm
from trials.slurm.jobs import JobQueue
from trials.store import TrialStore

LOOK_SECONDS = 0.5
DRAIN_SECONDS = 60.0
"""Seconds for replicas to save and leave, when the scheduler is told to end."""

END_SECONDS = 30.0
"""Seconds for Slurm's controller to answer, when jobs are to be taken back."""

logger = logging.getLogger(__name__)


class PoolSite(AgentSite):
    def __init__(self, slurm: Slurm, pool: PoolSettings, agents: AgentSettings) -> None:
        roster = Roster()
        launcher = AgentLauncher(roster, end=self._end, queued=self.queued)
        super().__init__(replace(agents, container=pool.container or agents.container), roster, launcher)
        self._slurm = slurm
        self._settings = pool
        self._folder = agents.state_dir.resolve()
        self._pool: Pool | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.grows = True
        self.most_slots = pool.most_slots

    def queue(self) -> tuple[WaitingJob, ...]:
        return () if self._pool is None else self._pool.views()

    def held_hours(self) -> float | None:
        return None if self._pool is None else self._pool.held_hours

    def queue_trouble(self) -> str:
        return "; ".join(
            [*(each.trouble for each in self.queued() if each.trouble), *self._agents.strangers(self.roster)]
        )

    def call_on_change(self, wake: Callable[[], None]) -> None:
        self.roster.on_news = wake

    def queued(self) -> Sequence[QueuedSlots]:
        return () if self._pool is None else self._pool.queued()

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        """Begin the pool; raise SchedulerError if Slurm would refuse its jobs."""
        self.roster.expect(store.replicas())
        logs = self._folder / "agents"
        logs.mkdir(parents=True, exist_ok=True)
        queue = JobQueue(
            self._slurm,
            # As long as the scheduler has its secrets, it knows its jobs again.
            mark=f"elastune {hashlib.sha256(agents_token.encode()).hexdigest()[:12]}",
            options=self._settings.sbatch_options(str(logs) if self._agents.shares_files else None),
            script=self._agents.job_script(),
            environ={
                **self._agents.environ(),
                AGENT_VARIABLE: self._agents.description(url, agents_token),
            },
        )
        try:
            queue.try_out()
        except SlurmRefused as error:
            raise SchedulerError(f"Slurm refuses jobs with the options of --slurm: {error}") from error
        except SlurmUnreachable as error:
            logger.warning("Slurm does not answer yet: %s", error)
        used = UsedHours(self._folder / "pool.json")

        def label_of(replica_id: str) -> str:
            try:
                spec = store.trial(replica_id.rpartition("-")[0]).spec
                title = next((study.called for study in store.studies() if study.name == spec.study), spec.study)
            except (UnknownTrial, StoreUnavailable):
                return "unknown"
            return f"{title}/{spec.number}"

        pool = self._pool = Pool(
            queue, self._settings, self.roster, used, logs=logs, clock=time.time, label_of=label_of
        )
        self._thread = threading.Thread(target=self._run, args=(pool, loop), name="pool", daemon=True)
        self._thread.start()

    def _run(self, pool: Pool, loop: ControlLoop) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                pool.look(loop.decisions.snapshot, time.monotonic())
            except Exception:
                logger.exception("managing the pool failed")

    def drain(self) -> None:
        """Empty the queue: jobs that wait are taken back, the others end when their replicas have left."""
        self._stop_looking()
        if self._pool is None:
            return
        try:
            self._pool.take_back_waiting()
        except (SlurmRefused, SlurmUnreachable) as error:
            logger.warning("jobs not cancelled yet: %s", error)
        self.roster.dismiss_all(DRAIN_SECONDS)

    def _stop_looking(self) -> None:
        """Wait for what is being asked of Slurm, which may be more jobs."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2.0 * PATIENCE_SECONDS)

    def _end(self) -> None:
        self._stop_looking()
        deadline = time.monotonic() + END_SECONDS
        while self._pool is not None:
            try:
                self._pool.end()
                return
            except (SlurmRefused, SlurmUnreachable) as error:
                if time.monotonic() > deadline:
                    logger.error("jobs may be left in the queue: `squeue --me` shows them error=%s", error)
                    return
                time.sleep(2.0)
