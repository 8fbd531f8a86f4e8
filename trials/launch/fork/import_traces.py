"""What a process is at a moment, and which difference between two moments forked replicas could not have in common."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
_GPU_COUNTED = re.compile(r"/dev/nvidia(ctl|\d+)")
_GPU_IN_USE = "/dev/nvidia-uvm"
"""Opened by a process that starts CUDA, and not by one that only counts the GPUs."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What an import may not change."""

    descriptors: frozenset[tuple[str, str]]
    threads: int
    children: str
    shared_memory: frozenset[str]
    process: tuple[object, ...]
    randomness: tuple[object, ...]


def traces() -> Traces:
    """Of this process, now."""
    open_now = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            open_now.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the listing itself
    _, keys, *rest = numpy.random.get_state()
    randomness = (random.getstate(), numpy.asarray(keys).tobytes(), *rest)
    threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared_memory = frozenset(line.split()[0] for line in maps if line.split()[1] == "rw-s")
    torch = sys.modules.get("torch")
    process = (
        dict(os.environ),
        os.getcwd(),
        [signal.getsignal(number) for number in _SIGNALS],
        None if torch is None else torch.get_num_threads(),
    )
    return Traces(frozenset(open_now), threads, children, shared_memory, process, randomness)


def why_unfit(before: Traces, after: Traces) -> str | None:
    """What the code that ran in between did, in words; None when processes forked afterwards may share it."""
    opened = sorted(path for _, path in after.descriptors - before.descriptors)
    # Counting GPUs leaves these open, and harms nobody.
    opened = [path for path in opened if not _GPU_COUNTED.fullmatch(path)]
    if any(path.startswith(_GPU_IN_USE) for path in opened):
        return "it starts CUDA while it is imported"
    if opened:
        return f"it opens {opened[0]} while it is imported and keeps it open"
    if after.threads > 1:
        return f"it starts threads while it is imported ({after.threads - 1})"
    if after.children != before.children:
        return "it starts processes while it is imported"
    if after.shared_memory - before.shared_memory:
        return "it makes memory or locks that several processes share while it is imported"
    if after.process != before.process:
        return "it changes variables, the folder, signals or torch's threads of its process while it is imported"
    if after.randomness != before.randomness:
        return "it seeds or draws random numbers while it is imported"
    return None
