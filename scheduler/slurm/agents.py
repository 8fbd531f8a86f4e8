"""Agents on a cluster's nodes: how they are started and what they are told, in an allocation and as jobs."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from scheduler.errors import SchedulerError
from scheduler.host.sites import without_secrets
from scheduler.snapshot import NodeView
from trials.agents.agent import LEAVE_SECONDS
from trials.agents.roster import Roster
from trials.agents.start import AgentDescription
from trials.launch.emulated import emulation
from trials.launch.fork.start import own_path
from trials.launch.node_environ import node_environ

OF_ANOTHER_NODE = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HOSTNAME",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TMPDIR",
)
"""Variables that are true of the node of this process alone."""
OF_PYTHON = ("CONDA_DEFAULT_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of this machine's interpreter; a container has its own."""

CONTAINED = """agent= told=
trap 'if [ -n "$agent" ]; then kill -USR1 $agent; else told=yes; fi' TERM USR1
trap '' INT
{start} &
agent=$!
if [ -n "$told" ]; then kill -USR1 $agent; fi
while kill -0 $agent 2>/dev/null; do wait $agent; done
"""
"""srun ends its step by force when it is told to end itself; what it is told by USR1 it hands on.

A signal may come before the shell has noted whom to tell: it is kept until then.
"""


def container_options(text: str) -> tuple[str, ...]:
    """Raises SchedulerError for what is no option of srun's for containers."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SchedulerError(f"--container is {text!r}, which cannot be parsed as options: {error}") from error
    for word in words:
        if not word.startswith("--container"):
            raise SchedulerError(
                f"--container has {word!r}; it takes only srun's options for containers, such as "
                "'--container-image=img.sqsh --container-mounts=/data:/data'"
            )
    return tuple(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """As the user has it, for all agents."""

    state_dir: Path
    preload: str = "torch"
    fork_server: bool = True
    emulate: str | None = None
    slots_per_gpu: int = 1
    gpus_per_slot: int = 1
    memory_per_slot: float | None = None
    interface: str = ""
    prologue: str = ""
    """Lines of bash that run on the node before anything else: modules, a conda environment."""
    container: tuple[str, ...] = ()
    """Options of srun that put agents into a container."""
    leave_seconds: float = LEAVE_SECONDS
    """Longest that replicas get to save when an agent has to leave."""
    shares_files: bool = True
    """True if nodes see the state folder and the sweeps' code."""
    is_shared: bool = False
    """True if others than this process's user have trials there: they get none of its environment."""

    @property
    def command(self) -> tuple[str, ...]:
        """Starts an agent on a node."""
        start = f"exec {self._python} -m trials.agents.start"
        if not self.prologue:
            return ("/bin/sh", "-c", start)
        return ("/bin/bash", "-lc", f"{self._prologue}\n{start}")

    @property
    def _python(self) -> str:
        """A container has its own."""
        return "python3" if self.container else shlex.quote(sys.executable)

    def job_script(self) -> str:
        """Return the script of a job that runs an agent in its own place, so that the agent hears the job's signals."""
        start = f"{self._python} -m trials.agents.start"
        if self.container:
            options = " ".join(map(shlex.quote, self.container))
            start = f"srun --ntasks=1 --cpu-bind=none --mem=0 {options} {start}"
            return "\n".join([self._shell, *self._lines, CONTAINED.format(start=start)])
        return "\n".join([self._shell, *self._lines, f"exec {start}", ""])

    @property
    def _shell(self) -> str:
        # A login shell: sites define `module` in its profile.
        return "#!/bin/bash -l" if self.prologue else "#!/bin/bash"

    @property
    def _lines(self) -> list[str]:
        return [self._prologue] if self.prologue else []

    @property
    def _prologue(self) -> str:
        """Ends what it is part of where its last command fails."""
        return f"{{ {self.prologue}\n}} || {{ echo 'elastune: the prologue failed, status '$? >&2; exit 1; }}"

    def environ(self) -> dict[str, str]:
        """Return the environment of an agent and its replicas: this process's, as far as it is true of another node."""
        own = without_secrets(os.environ)
        own = node_environ(own) if self.is_shared else own
        dropped = {*OF_ANOTHER_NODE, *(OF_PYTHON if self.container else ())}
        found = {name: value for name, value in own.items() if name not in dropped and not name.startswith("ELASTUNE_")}
        if not self.container:
            # It finds this suite where it is not installed.
            found["PYTHONPATH"] = os.pathsep.join([*own_path(), *filter(None, [found.get("PYTHONPATH")])])
        return found

    @property
    def emulated(self) -> str:
        """A sentence where slots stand for devices that are not there."""
        if self.emulate is None:
            return ""
        return f"devices are emulated: steps take as long as {emulation(self.emulate, slots=1).profile.name} says"

    def strangers(self, roster: Roster) -> list[str]:
        """Describe nodes on which nothing is started, because nobody could read what it writes."""
        hosts = ", ".join(sorted({news.host for news in roster.agents() if not news.shares_files}))
        folder = self.state_dir.resolve()
        rule = "name one that all nodes share (--state-dir, or state_dir= of optimize)"
        return [f"{hosts} cannot see the state folder {folder}: {rule}"] if hosts else []

    @staticmethod
    def node_views(roster: Roster) -> tuple[NodeView, ...]:
        """Return the views of the nodes that agents are on."""
        given: dict[str, set[str]] = {}
        for news in roster.agents():
            if news.job:
                given.setdefault(news.host, set()).add(
                    f"job {news.job} in {news.pool}" if news.pool else f"job {news.job}"
                )
        return tuple(
            NodeView(
                name=node.node,
                slots=node.slots - len(node.in_use),
                kind=node.kind,
                given_by=", ".join(sorted(given.get(node.node, ()))),
            )
            for node in roster.nodes()
        )

    def description(self, url: str, token: str) -> str:
        return AgentDescription(
            url=url,
            token=token,
            server_file=str(self.state_dir.resolve() / "server.json"),
            preload=self.preload,
            fork_server=self.fork_server,
            emulate=self.emulate,
            slots_per_gpu=self.slots_per_gpu,
            gpus_per_slot=self.gpus_per_slot,
            memory_bytes=None if self.memory_per_slot is None else int(self.memory_per_slot * 2**30),
            interface=self.interface,
            leave_seconds=self.leave_seconds,
            shares_files=self.shares_files,
        ).to_text()
