"""Starts the fork server: a chain of processes, each forked from the one before with more modules in memory.

The first is ready early and serves the first replicas; the last has everything. Beginning the chain needs nothing but
this file: whoever starts a scheduler can do it before importing the scheduler itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FORKABLE = {
    # Without it, a mere look for GPUs starts CUDA, and no process forked afterwards could.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Without it, importing pyarrow starts a thread, of jemalloc's, which is not in processes forked afterwards.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables of a process that others are forked from, by which libraries leave it fit for that."""

Stages = Sequence[Sequence[str]]
"""Names of modules: what each process of the chain imports beyond those before it."""


STAGES = (
    ("numpy", "httpx2", "dist_core.trial.plain_replica", "dist_core.present", "dist_core.training.api"),
    ("torch", "torch.distributed", "torch.utils.data", "dist_core.training.model", "dist_core.training.loader"),
    ("torch._dynamo", "dist_core.replica_preload"),
)
"""Modules that most replicas import, in the order in which the server loads them.

The first process has what every replica needs, and stays without torch for those whose code does. torch's compiler
takes as long to import as the rest of torch. The first optimizer needs it, the first line of a trial does not: so the
first replicas start without it.
"""


@dataclass(frozen=True, slots=True)
class StartedForkServer:
    process: subprocess.Popen[bytes]
    connections: tuple[socket.socket, ...]
    """Our ends of the lines to the processes of the chain, in their order."""
    stages: tuple[tuple[str, ...], ...]
    environ: Mapping[str, str]
    """Variables of its processes, as far as replicas may have them too."""

    def close(self) -> None:
        """Close one that nobody uses: it ends when it has imported what it is importing."""
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.wait()


HASHES_ALIKE = {"PYTHONHASHSEED": "0"}
"""Has sets of texts in one order in all replicas of all nodes, but pods, unless they are given a seed."""


def start_fork_server(stages: Stages, environ: Mapping[str, str] | None = None) -> StartedForkServer:
    """Start a fork server with a process for each stage.

    ``environ``: what replicas will inherit; default: this process's own. What imports read of it has to be alike.
    Each process says that it is ready over its own connection; all end when theirs closes.
    """
    inherited = dict(os.environ if environ is None else environ)
    pairs = [socket.socketpair() for _ in stages]
    arguments = [f"{theirs.fileno()}:{','.join(names)}" for (_, theirs), names in zip(pairs, stages, strict=True)]
    process = subprocess.Popen(
        [sys.executable, "-m", "trials.launch.fork.server", *arguments],
        pass_fds=[theirs.fileno() for _, theirs in pairs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={
            **HASHES_ALIKE,
            **inherited,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **FORKABLE,
            "PYTHONPATH": os.pathsep.join([*own_path(), os.environ.get("PYTHONPATH", "")]),
        },
    )
    for _, theirs in pairs:
        theirs.close()
    connections = tuple(ours for ours, _ in pairs)
    return StartedForkServer(process, connections, tuple(tuple(names) for names in stages), inherited)


def own_path() -> list[str]:
    """Folders a bare interpreter needs to import this suite, also when it runs from a checkout."""
    return [os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))]


def stages_for(preload: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the stages for replicas that import these modules; no process has torch unless it is among them."""
    without, with_torch, *later = STAGES
    if not any(name.partition(".")[0] == "torch" for name in preload):
        return ((*without, *preload),)
    return (without, (*with_torch, *(name for name in preload if name not in with_torch)), *later)
