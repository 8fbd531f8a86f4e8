"""Slurm's own commands, what they say when they refuse something, and the allocation that this process runs in.

Large sites ban those who ask their controller often: every call that reaches it is counted, and whoever looks again
and again asks one question for all.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trials.errors import SlurmRefused, SlurmUnreachable

PATIENCE_SECONDS = 30.0
AWAY = (
    "Unable to contact slurm controller",
    "Unable to contact slurmctld",
    "Zero Bytes were transmitted",
    "Protocol authentication error",
    "Unable to establish",
    "slurmctld is in standby mode",
    "munge",
    "Socket timed out",
    "Connection refused",
    "Communication connection failure",
)
"""Messages of Slurm when its controller does not answer, which passes; anything else is a refusal."""
MOST_WORDS = 600

logger = logging.getLogger(__name__)


class Slurm:
    """Runs Slurm's commands.

    ``environ``: of the commands; default: this process's, without what says which step it is itself.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = outside_of_steps(os.environ if environ is None else environ)

    def run(self, command: str, *arguments: str, environ: Mapping[str, str] | None = None, stdin: str = "") -> str:
        """Return what the command prints. Raises SlurmRefused with its own words, or SlurmUnreachable.

        ``environ``: all that a job is to have of it, beside what commands go by.
        """
        own = self.environ if environ is None else {**of_commands(self.environ), **environ}
        try:
            done = subprocess.run(
                [command, *arguments],
                input=stdin,
                env=dict(own),
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise SlurmRefused(
                f"{command} was not found: this machine has no Slurm, or its commands are not on PATH; run this "
                "where `sinfo` works, or leave --slurm out"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmUnreachable(f"{command} did not answer for {PATIENCE_SECONDS:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        words = said(done.stderr or done.stdout)
        if any(each in words for each in AWAY):
            raise SlurmUnreachable(f"{command}: {words}")
        raise SlurmRefused(f"{command} {arguments[0] if arguments else ''}: {words or f'status {done.returncode}'}")

    def hostnames(self, nodes: str) -> list[str]:
        """Expand a host list such as ``n[1-4,7]`` to names; needs no controller."""
        return self.run("scontrol", "show", "hostnames", nodes).split()


def said(text: str) -> str:
    """Return what a command complained of, without its own name before each line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = [line.partition(": error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(shown))[:MOST_WORDS]


DEFAULTS = ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION", "WCKEY")
"""Variables of `sbatch` that people set for all of their jobs."""
OF_COMMANDS = ("SLURM", "SBATCH", "SALLOC", "SCANCEL", "SINFO", "SQUEUE", "SRUN", "PMI")


def outside_of_steps(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a job's script or step adds, and without habits of what commands show."""
    kept = {"SLURM_CONF", *(() if "SLURM_JOB_ID" in environ else (f"SBATCH_{name}" for name in DEFAULTS))}
    return {name: value for name, value in environ.items() if name in kept or not name.startswith(OF_COMMANDS)}


def of_commands(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm's commands go by."""
    return {name: value for name, value in environ.items() if name.startswith(("SLURM_", "SBATCH_"))}


COMPLAINTS = (
    "error",
    "leaving: ",
    "elastune agent",
    "elastune: ",
    "not found",
    "No such file",
    "No module",
    "CANCELLED",
    "oom",
)
READ_BYTES = 4096


def complaint(log: Path, began: int = 0) -> str:
    """Return the last lines from the byte ``began`` on that tell of trouble, else the very last one.

    Empty without any.
    """
    try:
        with open(log, "rb") as file:
            file.seek(began)
            lines = file.read()[-READ_BYTES:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line.partition(" INFO ")[2] or line for line in lines if "lacks support for cpu binding" not in line]
    found = [line for line in lines if any(each in line for each in COMPLAINTS)] or lines[-1:]
    return said("\n".join(found[-2:]))


@dataclass(frozen=True, slots=True)
class Allocation:
    job: str
    nodes: tuple[str, ...]
    pool: str
    """Its partition."""
    here: str
    """Node that this process is on; empty where it is on none, as in a shell of `salloc`."""

    @property
    def is_this_machine(self) -> bool:
        """Tell whether all of it is where this process runs: then no other node has to be reached."""
        return self.nodes == (self.here,)


ORDINARY_STEPS = 0xFFFFFFF0
"""Higher numbers are those of a job's script and of the shell of `salloc`, which speak for all of the job."""


def allocation(environ: Mapping[str, str], hostnames: Callable[[str], list[str]]) -> Allocation | None:
    """Return the allocation that this process runs in, or None; ``hostnames`` expands Slurm's short form of nodes.

    In a step that `srun` has started it is the step's nodes: the others may be other
    steps'.
    """
    job = environ.get("SLURM_JOB_ID", "")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < ORDINARY_STEPS:
        listed = environ.get("SLURM_STEP_NODELIST") or listed
    if not job or not listed:
        return None
    # A container may lack Slurm's commands.
    nodes = tuple(hostnames(listed)) if "[" in listed or "," in listed else (listed,)
    here = environ.get("SLURMD_NODENAME", "")
    return Allocation(job, nodes, environ.get("SLURM_JOB_PARTITION", ""), here if here in nodes else "")
