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


@dataclass(frozen=True, slots=True)
class StartedForkServer:
    process: subprocess.Popen[bytes]
    connections: tuple[socket.socket, ...]
    """Our ends of the lines to the processes of the chain, in their order."""
    stages: tuple[tuple[str, ...], ...]

    def close(self) -> None:
        """For one that nobody uses: it ends when it has imported what it is importing."""
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.wait()


def start_fork_server(stages: Stages, environ: Mapping[str, str] | None = None) -> StartedForkServer:
    """``environ``: what replicas will inherit; default: this process's own. What imports read of it has to be alike.

    Each process says that it is ready over its own connection; all end when theirs closes."""
    pairs = [socket.socketpair() for _ in stages]
    arguments = [f"{theirs.fileno()}:{','.join(names)}" for (_, theirs), names in zip(pairs, stages, strict=True)]
    process = subprocess.Popen(
        [sys.executable, "-m", "trials.launch.fork.server", *arguments],
        pass_fds=[theirs.fileno() for _, theirs in pairs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={
            **(os.environ if environ is None else environ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **FORKABLE,
            "PYTHONPATH": os.pathsep.join([*own_path(), os.environ.get("PYTHONPATH", "")]),
        },
    )
    for _, theirs in pairs:
        theirs.close()
    return StartedForkServer(process, tuple(ours for ours, _ in pairs), tuple(tuple(names) for names in stages))


def own_path() -> list[str]:
    """Folders a bare interpreter needs to import this suite, also when it runs from a checkout."""
    return [os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))]
