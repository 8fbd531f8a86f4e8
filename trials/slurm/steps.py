"""Agents inside an allocation: one long step on each of its nodes.

Level-triggered: each look starts what is missing, after a while where it has just failed. A step of an earlier
scheduler of this job that still runs is left alone: its agent calls this one by itself.

Concurrency: one thread looks; each step's `srun` is waited for by a thread of its own.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trials.agents.roster import Roster
from trials.agents.words import AGENT_VARIABLE
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.slurm.commands import Allocation, Slurm, complaint, of_commands

STEP_NAME = "elastune-agent"
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
RETURN_SECONDS = 20.0
"""Seconds for agents of an earlier process to call: they ask again when an answer is 15 s late."""
MOST_FAILURES = 10
"""Most failures that are counted."""
END_SECONDS = 40.0
"""Seconds for agents to have their replicas save and leave."""

logger = logging.getLogger(__name__)


class AgentSteps:
    """Steps of an allocation that run an agent on each of its nodes.

    ``command``: starts an agent on a node. ``options``: of srun, beside those that it needs.

    ``description``: what the agent has to know. ``environ``: what it inherits. ``logs``: a folder for what agents
    print.
    """

    def __init__(
        self,
        slurm: Slurm,
        allocation: Allocation,
        roster: Roster,
        *,
        command: Sequence[str],
        description: str,
        logs: Path,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._slurm = slurm
        self._allocation = allocation
        self._roster = roster
        self._command = command
        self._options = options
        self._description = description
        self._logs = logs
        self._environ = environ or {}
        self._steps: dict[str, subprocess.Popen[bytes]] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._closed = False
        self._lock = threading.Lock()
        self.troubles: dict[str, str] = {}
        """Trouble by node: Slurm's words, or the agent's last ones, where it has none."""

    def begin(self) -> None:
        """Start the steps that no earlier scheduler of this job has left."""
        for node in self._nodes_with_steps():
            # Its agent has a moment to call.
            self._not_before[node] = time.monotonic() + RETURN_SECONDS
        self.look()

    def _nodes_with_steps(self) -> set[str]:
        try:
            listed = self._slurm.run(
                "squeue", "--steps", "--noheader", f"--jobs={self._allocation.job}", "--format=%j|%N"
            )
            found = [line.strip().partition("|") for line in listed.splitlines()]
            return {node for name, _, nodes in found if name == STEP_NAME for node in self._slurm.hostnames(nodes)}
        except (SlurmRefused, SlurmUnreachable) as error:
            logger.warning("could not list steps: %s", error)
            return set()

    def look(self) -> None:
        """Start what is missing."""
        present = {news.host for news in self._roster.agents()}
        with self._lock:
            if self._closed:
                return
            for node in self._allocation.nodes:
                if node in self._steps or node in present or time.monotonic() < self._not_before.get(node, 0.0):
                    continue
                try:
                    self._start(node)
                except OSError as error:
                    # Others are not to wait for it.
                    self._note_failure(node, f"srun cannot be started: {error}")

    def _start(self, node: str) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{node}.log"
        words = [
            "srun",
            f"--jobid={self._allocation.job}",
            f"--job-name={STEP_NAME}",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            # Beside the step that this process may be in, on all that the job has there.
            "--overlap",
            "--cpu-bind=none",
            "--mem=0",
            "--kill-on-bad-exit=0",
            "--unbuffered",
            *self._options,
            *self._command,
        ]
        with open(log, "ab") as output:
            began = output.tell()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A scheduler that takes over after a kill finds them.
                start_new_session=True,
                env={**of_commands(self._slurm.environ), **self._environ, AGENT_VARIABLE: self._description},
            )
        self._steps[node] = process
        logger.info("agent step started job=%s node=%s", self._allocation.job, node)
        waiting = (node, process, log, began)
        threading.Thread(target=self._await, args=waiting, name="agent-step", daemon=True).start()

    def _await(self, node: str, process: subprocess.Popen[bytes], log: Path, began: int) -> None:
        status = process.wait()
        words = complaint(log, began)
        with self._lock:
            self._steps.pop(node, None)
            self._note_failure(node, "")
            closed = self._closed
        there = [news for news in self._roster.agents() if news.host == node]
        why = f"the agent of {node} has ended" + (f": {words}" if words else "")
        for news in there:
            if not news.leaves or status != 0:
                why = f"node {node} of job {self._allocation.job} was lost" + (f": {words}" if words else "")
            self._roster.lose(news.agent, why)
        if not closed:
            self.troubles[node] = why
            logger.warning("agent step ended node=%s status=%d words=%s", node, status, words)
            self._roster.on_news()

    def _note_failure(self, node: str, why: str) -> None:
        """Note a failure; the next attempt comes later each time."""
        failures = self._failures[node] = min(self._failures.get(node, 0) + 1, MOST_FAILURES)
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1))
        self._not_before[node] = time.monotonic() + pause
        if why:
            self.troubles[node] = why

    def note_there(self) -> None:
        """Forget what went wrong on nodes whose agents have called."""
        for news in self._roster.agents():
            self.troubles.pop(news.host, None)
            self._failures.pop(news.host, None)

    def close(self) -> None:
        """Have every agent end with what it runs; those that do not within a while are ended."""
        with self._lock:
            self._closed = True
            steps = list(self._steps.values())
        self._roster.dismiss("its scheduler has ended")
        for process in steps:
            # srun hands it on; the scheduler may not answer any more.
            process.send_signal(signal.SIGUSR2)
        self._end_adopted()
        deadline = time.monotonic() + END_SECONDS
        for process in steps:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # Told twice, srun ends its step by force.
                process.terminate()
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _end_adopted(self) -> None:
        """End agents of steps that an earlier scheduler has started."""
        own = self._steps.keys()
        steps = [f"{news.job}.{news.step}" for news in self._roster.agents() if news.step and news.host not in own]
        if not steps:
            return
        try:
            self._slurm.run("scancel", "--signal=USR2", *steps)
        except (SlurmRefused, SlurmUnreachable) as error:
            logger.warning("could not tell steps to end: %s", error)
