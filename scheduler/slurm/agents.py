"""How agents are started on a cluster's nodes, and what they are told: the same inside an allocation and as jobs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.host.sites import without_secrets
from scheduler.snapshot import NodeView
from trials.agents.roster import Roster
from trials.agents.start import AgentDescription
from trials.launch.emulated import emulation
from trials.launch.fork.start import own_path

OF_ANOTHER_NODE = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HOSTNAME",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TMPDIR",
)
"""What is true of the node that this process runs on alone."""
OF_PROLOGUE = (
    "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
"""What a prologue changes: there it holds, and not what this process has."""


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
    python: str = ""
    """Interpreter on the nodes; empty: this process's own."""
    options: tuple[str, ...] = field(default=())
    """Further ones of srun, such as a container's."""

    @property
    def command(self) -> tuple[str, ...]:
        """Starts an agent on a node."""
        start = f"exec {shlex.quote(self.python or sys.executable)} -m trials.agents.start"
        if not self.prologue:
            return ("/bin/sh", "-c", start)
        # A login shell: sites define `module` in its profile.
        return ("/bin/bash", "-lc", f"{self._prologue}\n{start}")

    def job_script(self, container: tuple[str, ...] = ()) -> str:
        """Of a job that runs an agent: its process takes the script's place, so that it hears the job's signals."""
        python = shlex.quote(self.python or ("python3" if container else sys.executable))
        start = f"{python} -m trials.agents.start"
        if container:
            options = " ".join(map(shlex.quote, container))
            start = f"srun --ntasks=1 --cpu-bind=none --mem=0 {options} {start}"
        shell = "#!/bin/bash -l" if self.prologue else "#!/bin/bash"
        return "\n".join([shell, *([self._prologue] if self.prologue else []), f"exec {start}", ""])

    @property
    def _prologue(self) -> str:
        """Ends what it is part of where its last command fails."""
        return f"{{ {self.prologue}\n}} || {{ echo 'elastune: the prologue failed, status '$? >&2; exit 1; }}"

    @property
    def environ(self) -> dict[str, str]:
        """Of an agent, so that it finds this suite where it is not installed."""
        known = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": os.pathsep.join([*own_path(), *([known] if known else [])])}

    @property
    def emulated(self) -> str:
        """A sentence where slots stand for devices that are not there."""
        if self.emulate is None:
            return ""
        return f"devices are emulated: steps take as long as {emulation(self.emulate, slots=1).profile.name} says"

    @staticmethod
    def node_views(roster: Roster) -> tuple[NodeView, ...]:
        """What is shown of the nodes that agents are on."""
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
        ).to_text()

    def replica_environ(self, own: Mapping[str, str], *, is_shared: bool) -> dict[str, str]:
        """What replicas inherit of the scheduler's environment; the rest is their node's."""
        if is_shared:
            return {}
        dropped = {*OF_ANOTHER_NODE, *(OF_PROLOGUE if self.prologue else ())}
        return {
            name: value
            for name, value in without_secrets(own).items()
            if name not in dropped and not name.startswith(("SLURM", "SBATCH", "SRUN", "PMI"))
        }
