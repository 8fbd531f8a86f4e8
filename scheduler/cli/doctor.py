"""`elastune doctor`: what this machine has, and what would go wrong on it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from scheduler.cli.connecting import state_dir

GOOD, WARN, BAD = "ok", "note", "wrong"
LEAST_FREE_BYTES = 2 * 2**30
LEAST_DESCRIPTORS = 4096
PORT = 7300


@dataclass(frozen=True, slots=True)
class Finding:
    state: str
    what: str
    words: str


@click.command("doctor")
@click.option(
    "--port",
    type=click.IntRange(min=1, max=65535),
    default=PORT,
    show_default=True,
    help="Port that `elastune up` will use.",
)
@state_dir
def doctor(port: int, state_dir: Path | None) -> None:
    """Check GPUs, cores, memory, control groups, folders, ports and versions for problems."""
    from scheduler.client.finding import default_state_dir

    findings = [*_python(), *_devices(), *_memory(), *_folder(state_dir or default_state_dir()), *_net(port), *_slurm()]
    findings += _page()
    marks = {GOOD: "✓", WARN: "!", BAD: "✗"}
    for finding in findings:
        click.echo(f"{marks[finding.state]} {finding.what}: {finding.words}")
    wrong = sum(finding.state == BAD for finding in findings)
    if wrong:
        click.echo(f"{wrong} problem{'s' * (wrong != 1)} found")
        raise SystemExit(1)


def _python() -> Iterator[Finding]:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} at {sys.prefix}"
    yield Finding(GOOD if sys.version_info >= (3, 10) else BAD, "Python", found)
    for name, extra, needed in (
        ("torch", "torch", "elastic training"),
        ("optuna", "optuna", "Optuna sweeps"),
        ("nni", "nni", "NNI experiments"),
        ("kubernetes", "kubernetes", "running on a cluster"),
        ("matplotlib", "pictures", "`elastune timeline`"),
    ):
        try:
            yield Finding(GOOD, name, version(name))
        except PackageNotFoundError:
            yield Finding(WARN, name, f"not installed; {needed} needs it: pip install 'elastune[{extra}]'")


def _devices() -> Iterator[Finding]:
    from trials.launch.gpus import Nvml
    from trials.launch.slots import usable_cores

    gpus = Nvml().gpus()
    cores = len(usable_cores())
    if gpus:
        yield Finding(GOOD, "GPUs", f"{len(gpus)}; each is one slot")
        if importlib.util.find_spec("torch") is not None and "+cpu" in version("torch"):
            yield Finding(BAD, "torch", "is a CPU-only build although there are GPUs: install PyTorch's CUDA build")
    else:
        yield Finding(
            WARN, "GPUs", f"NVML finds none; slots are CPU cores ({cores}), or emulated devices with --emulate"
        )
    yield Finding(GOOD, "cores", f"{cores} that this process may use")


def _memory() -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    yield Finding(GOOD if free > 2 else WARN, "memory", f"{free:.1f} GiB free")
    from trials.inside.cgroups import Cgroups

    groups = Cgroups.find()
    if groups is None:
        words = "this user cannot create any; replicas' child processes end with them, but their memory is only watched"
        yield Finding(WARN, "control groups", words)
    elif groups.memory is None:
        words = "each replica gets its own, but the memory controller cannot be used: memory is only watched"
        yield Finding(WARN, "control groups", words)
    else:
        yield Finding(GOOD, "control groups", "each replica gets its own, with its limit of memory")


def _folder(folder: Path) -> Iterator[Finding]:
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(existing, os.W_OK):
        yield Finding(BAD, "state folder", f"{folder} cannot be written; choose another with --state-dir")
        return
    free = shutil.disk_usage(existing).free
    state = GOOD if free > LEAST_FREE_BYTES else BAD
    yield Finding(state, "state folder", f"{folder}, {free / 2**30:.1f} GiB free for checkpoints and logs")
    if folder.is_dir() and folder.stat().st_mode & 0o077:
        words = f"{folder} can be read by others, and it holds the token: chmod 700 {folder}"
        yield Finding(WARN, "state folder", words)


def _net(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            yield Finding(GOOD, "port", f"{port} is free")
        except (OSError, OverflowError) as error:
            yield Finding(WARN, "port", f"cannot listen on {port} ({error}); give `up` another with --port")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= LEAST_DESCRIPTORS
    yield Finding(
        GOOD if enough else WARN, "open files", f"{soft} now, can be raised to {most}; a replica takes one or two"
    )
    url = os.environ.get("ELASTUNE_URL")
    if url:
        yield Finding(WARN, "ELASTUNE_URL", f"{url}: sweeps use this scheduler, not one of their own")


def _slurm() -> Iterator[Finding]:
    """Yield findings about Slurm, none where there is no Slurm."""
    from trials.errors import SlurmRefused, SlurmUnreachable
    from trials.slurm.commands import Slurm, allocation

    if shutil.which("sinfo") is None:
        return
    slurm = Slurm()
    try:
        given = allocation(os.environ, slurm.hostnames)
        if given is not None:
            nodes = "this node" if given.is_this_machine else f"{len(given.nodes)} nodes, `up` uses all of them"
            yield Finding(GOOD, "Slurm", f"job {given.job}: {nodes}")
            return
        partitions = slurm.run("sinfo", "--noheader", "--format=%R").split()
        words = f"partitions {', '.join(partitions)}; `up --slurm` takes slots from them"
        yield Finding(GOOD, "Slurm", words)
    except (SlurmRefused, SlurmUnreachable) as error:
        yield Finding(WARN, "Slurm", str(error))


def _page() -> Iterator[Finding]:
    import scheduler

    built = Path(scheduler.__file__).parent / "dashboard" / "page" / "built" / "index.html"
    if built.is_file():
        yield Finding(GOOD, "web page", "built")
    else:
        yield Finding(WARN, "web page", "not built; `make page` builds it")
