"""Agents on a cluster's nodes: how they are started and what they are told, in an allocation and as jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from scheduler.api.site import Site
from scheduler.errors import SchedulerError
from scheduler.host.sites import without_secrets
from scheduler.snapshot import NodeView
from trials.agents.own_slots import address_of, address_towards
from trials.agents.roster import Roster
from trials.agents.start import AgentDescription, AgentOptions
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.launch.base import Launcher
from trials.launch.emulated import emulation
from trials.launch.fork.start import own_path
from trials.launch.node_environ import node_environ
from trials.slurm.commands import Slurm

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
    """Return srun's options for a container; raise SchedulerError for others."""
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
class AgentSettings(AgentOptions):
    """As the user has it, for all agents."""

    state_dir: Path
    memory_per_slot: float | None = None
    prologue: str = ""
    """Lines of bash that run on the node before anything else: modules, a conda environment."""
    container: tuple[str, ...] = ()
    """Options of srun that put agents into a container."""
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
        kept_environ = {
            name: value for name, value in own.items() if name not in dropped and not name.startswith("ELASTUNE_")
        }
        if not self.container:
            # It finds this suite where it is not installed.
            kept_environ["PYTHONPATH"] = os.pathsep.join([*own_path(), *filter(None, [kept_environ.get("PYTHONPATH")])])
        return kept_environ

    @property
    def emulated(self) -> str:
        """Sentence that says which devices are emulated; empty if none."""
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
        givers: dict[str, set[str]] = {}
        for news in roster.agents():
            if news.job:
                givers.setdefault(news.host, set()).add(
                    f"job {news.job} in {news.pool}" if news.pool else f"job {news.job}"
                )
        return tuple(
            NodeView(
                name=node.node,
                slots=node.slots - len(node.in_use),
                kind=node.kind,
                given_by=", ".join(sorted(givers.get(node.node, ()))),
            )
            for node in roster.nodes()
        )

    def description(self, url: str, token: str) -> str:
        return AgentDescription(
            url=url,
            token=token,
            server_file=str(self.state_dir.resolve() / "server.json"),
            memory_bytes=None if self.memory_per_slot is None else int(self.memory_per_slot * 2**30),
            **{each.name: getattr(self, each.name) for each in fields(AgentOptions)},
        ).to_text()


MOST_NODES = 8
"""Most nodes that are tried."""


def address_for(slurm: Slurm, nodes: Sequence[str], interface: str) -> str:
    """Return the named interface's address, else the one on the way to the first of these that is known.

    Raises SchedulerError where there is none.
    """
    try:
        if interface:
            return address_of(interface)
        shown = slurm.run("scontrol", "--oneliner", "show", "node", ",".join(nodes[:MOST_NODES]))
        addresses = re.findall(r"\bNodeAddr=(\S+)", shown) or list(nodes[:MOST_NODES])
        for address in addresses[:-1]:
            # Nodes of a cloud have no name before they are there.
            with contextlib.suppress(OSError):
                return address_towards(address)
        return address_towards(addresses[-1])
    except (OSError, SlurmRefused, SlurmUnreachable) as error:
        raise SchedulerError(
            f"cannot find the address by which the nodes reach this machine: {error}; name the address to listen on "
            "with --host, or a network interface that leads there with --interface"
        ) from error


class AgentSite(Site):
    roster: Roster

    def __init__(self, agents: AgentSettings, roster: Roster, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._agents = agents
        self.roster = roster
        self.runs_elsewhere = not agents.shares_files
        self.emulated = agents.emulated

    def nodes(self) -> tuple[NodeView, ...]:
        return self._agents.node_views(self.roster)
