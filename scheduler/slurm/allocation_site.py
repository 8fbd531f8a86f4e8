"""The nodes of the allocation that this process runs in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from scheduler.errors import SchedulerError
from scheduler.loop.control_loop import ControlLoop
from scheduler.slurm.agents import AgentSettings, AgentSite
from trials.agents.launcher import AgentLauncher
from trials.agents.roster import Roster
from trials.slurm.commands import Allocation, Slurm
from trials.slurm.steps import AgentSteps
from trials.store import TrialStore

FIRST_SECONDS = 300.0
"""Longest wait for a first agent: environments on cold file systems take their time."""
OTHERS_SECONDS = 30.0
"""Longest wait for the others, before a sweep goes on with those that have come."""

DRAIN_SECONDS = 25.0
"""Seconds for replicas to save and leave; Slurm ends by force what has not ended in 30 s."""


class AllocationSite(AgentSite):
    def __init__(self, slurm: Slurm, allocation: Allocation, agents: AgentSettings) -> None:
        roster = Roster()
        super().__init__(agents, roster, AgentLauncher(roster, look=self._look, end=self._end))
        self._slurm = slurm
        self._allocation = allocation
        self._steps: AgentSteps | None = None
        self._news = threading.Event()

    def queue_trouble(self) -> str:
        troubles = () if self._steps is None else self._steps.troubles.values()
        return "; ".join(dict.fromkeys([*troubles, *self._agents.strangers(self.roster)]))

    def call_on_change(self, wake: Callable[[], None]) -> None:
        def heard() -> None:
            self._news.set()
            wake()

        self.roster.on_news = heard

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        self.roster.expect(store.replicas())
        self._steps = AgentSteps(
            self._slurm,
            self._allocation,
            self.roster,
            options=self._agents.container,
            command=self._agents.command,
            description=self._agents.description(url, agents_token),
            logs=self._agents.state_dir / "agents",
            environ=self._agents.environ(),
        )
        self._steps.begin()

    def wait_until_there(self) -> None:
        """Wait for the agents of all nodes, or of fewer when that takes long.

        Raises SchedulerError when there is none.
        """
        assert self._steps is not None
        began = time.monotonic()
        while time.monotonic() - began < (OTHERS_SECONDS if self.roster.agents() else FIRST_SECONDS):
            self._news.clear()
            there = {news.host for news in self.roster.agents()}
            settled = there | self._steps.troubles.keys()
            if settled >= set(self._allocation.nodes):
                break
            self._news.wait(0.5)
        if not any(news.shares_files for news in self.roster.agents()):
            words = self.queue_trouble() or "they have not contacted the scheduler"
            raise SchedulerError(
                f"no agent started on the nodes of job {self._allocation.job} "
                f"({', '.join(self._allocation.nodes)}): {words}; "
                f"their output is in {self._agents.state_dir / 'agents'}"
            )

    def drain(self) -> None:
        """Have all agents' replicas save and leave; the allocation's job ends with the scheduler, in most cases."""
        self.roster.dismiss_all(DRAIN_SECONDS)

    def _look(self) -> None:
        if self._steps is not None:
            self._steps.look()
            self._steps.note_there()

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.close()
