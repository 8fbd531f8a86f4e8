"""A control group for each replica's process, where the machine lets us make one.

It holds every process that the replica starts, also those that leave its session, so that none is left behind; it may
limit the replica's memory, and it knows whether the kernel ended something for want of it. Version 2 is used for
holding and ending, version 2 or 1 for memory, whichever controls it. Without the right to make groups, replicas are
held by their session alone.

A process makes its group itself, before it is a replica: to move one costs the kernel milliseconds. Groups have its
pid in their names, so a scheduler that takes over finds those of the replicas it adopts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "elastune-"

FORGOTTEN_SECONDS = 60.0
"""A group is made and entered within moments; one that is older and empty is nobody's."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    unified: Path
    """Folder in which groups are made."""
    memory: Path | None
    """The same for the controller of memory, which is ``unified`` or one of version 1; None where nobody lets us."""

    @classmethod
    def find(cls, mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> Cgroups | None:
        """Return the groups that this process may use; None where it can make none."""
        try:
            paths = dict(_own_groups(own.read_text()))
            unified = memory = None
            for line in mounts.read_text().splitlines():
                _, where, kind, options, *_ = line.split(" ")
                if kind == "cgroup2" and "" in paths:
                    unified = Path(where) / paths[""].lstrip("/")
                elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
                    memory = Path(where) / paths["memory"].lstrip("/")
        except (OSError, ValueError):
            return None
        if unified is None or not _may_make(unified, "cgroup.kill"):
            return None
        if memory is None:
            # Refused where this very group has processes, as version 2 rules; then only holding and ending is left.
            with contextlib.suppress(OSError):
                (unified / "cgroup.subtree_control").write_text("+memory")
            memory = unified if _may_make(unified, "memory.max") else None
        elif not _may_make(memory, "memory.limit_in_bytes"):
            memory = None
        found = cls(unified, memory)
        found._remove_forgotten()
        return found

    def _remove_forgotten(self) -> None:
        """Empty groups whose scheduler has ended before it could; others stay, as the kernel rules."""
        for parent in {self.unified, self.memory or self.unified}:
            for folder in parent.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):
                    # One in which the kernel ended something still has to tell that.
                    if not _killed_in(folder) and time.time() - folder.stat().st_mtime > FORGOTTEN_SECONDS:
                        folder.rmdir()

    def to_json(self, memory_bytes: int | None = None) -> dict[str, Any]:
        """Describe the groups that a process is to make for itself (``enter_own``); ``memory_bytes``: its limit."""
        folders = dict.fromkeys([self.unified, *self._memory_folder()])
        limit = None
        if self.memory is not None and memory_bytes is not None:
            name = "memory.max" if self.memory == self.unified else "memory.limit_in_bytes"
            limit = [str(self.memory), name, memory_bytes]
        return {"folders": [str(folder) for folder in folders], "limit": limit}

    def ran_out_of_memory(self, pid: int) -> bool:
        """Tell whether the kernel has ended a process of this one's group for want of memory."""
        return self.memory is not None and _killed_in(self.memory / f"{PREFIX}{pid}")

    def end(self, pid: int) -> None:
        """End every process in the group that this one has made."""
        with contextlib.suppress(OSError):
            (self.unified / f"{PREFIX}{pid}" / "cgroup.kill").write_text("1")

    def remove(self, pid: int) -> bool:
        """End what is left, and take the groups away; False while something in them has not ended yet."""
        self.end(pid)
        return remove_own(self.to_json(), pid)

    def _memory_folder(self) -> list[Path]:
        return [] if self.memory is None else [self.memory]


def enter_own(groups: Mapping[str, Any] | None) -> None:
    """Make groups for the calling process, and enter them. It goes without where that cannot be done."""
    for folder in () if groups is None else map(Path, groups["folders"]):
        own = folder / f"{PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):
            if own.exists():
                # Of an earlier process of this number, whose scheduler did not come to it.
                own.rmdir()
            own.mkdir()
            if groups is not None and groups["limit"] is not None and groups["limit"][0] == str(folder):
                _, name, most = groups["limit"]
                (own / name).write_text(str(most))
            (own / "cgroup.procs").write_text("0")


def is_alone(groups: Mapping[str, Any] | None) -> bool:
    """Tell whether the calling process may be another replica in its groups: nothing is, or was ended, in them."""
    for folder in () if groups is None else map(Path, groups["folders"]):
        own = folder / f"{PREFIX}{os.getpid()}"
        with contextlib.suppress(OSError):
            if (own / "cgroup.procs").read_text().split() != [str(os.getpid())] or _killed_in(own):
                return False
    return True


def remove_own(groups: Mapping[str, Any] | None, pid: int) -> bool:
    """Take away the groups of a process that has ended; False while something is in them."""
    gone = True
    for folder in () if groups is None else map(Path, groups["folders"]):
        try:
            (folder / f"{PREFIX}{pid}").rmdir()
        except OSError as error:
            gone = gone and error.errno != errno.EBUSY
    return gone


def _killed_in(group: Path) -> bool:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0)) > 0
    return False


def _own_groups(text: str) -> list[tuple[str, str]]:
    """Return (controller, path) of each hierarchy; version 2 has no name."""
    groups = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups += [(name, path) for name in controllers.split(",")]
    return groups


def _may_make(parent: Path, needed: str) -> bool:
    """Tell whether groups with what is needed can be made there."""
    probe = parent / f"{PREFIX}probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return (probe / needed).exists()
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
