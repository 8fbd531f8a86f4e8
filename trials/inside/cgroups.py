"""A control group for each replica, where the machine lets us make one.

It holds every process that the replica starts, also those that leave its session, so that none is left behind; it may
limit the replica's memory, and it knows whether the kernel ended something for want of it. Version 2 is used for
holding and ending, version 2 or 1 for memory, whichever controls it. Without the right to make groups, replicas are
held by their session alone.

Groups are named after replicas, so a scheduler that takes over finds those of the replicas it adopts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "elastune-"

FORGOTTEN_SECONDS = 60.0
"""A group is made and entered within moments; one that is older and empty has lost its scheduler in between."""


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
        """Empty groups that were made for replicas which were never started; others stay, as the kernel rules."""
        for parent in {self.unified, self.memory or self.unified}:
            for folder in parent.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):
                    # One in which the kernel ended something still has to tell that.
                    told = self.ran_out_of_memory(folder.name.removeprefix(PREFIX))
                    if not told and time.time() - folder.stat().st_mtime > FORGOTTEN_SECONDS:
                        folder.rmdir()

    def make(self, replica_id: str, memory_bytes: int | None = None) -> list[str]:
        """Make the replica's groups; the files into which it has to write itself. Raises OSError."""
        folders = dict.fromkeys([self._unified(replica_id), *self._memory(replica_id)])
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for folder in self._memory(replica_id) if memory_bytes is not None else ():
            name = "memory.max" if self.memory == self.unified else "memory.limit_in_bytes"
            (folder / name).write_text(str(memory_bytes))
        return [str(folder / "cgroup.procs") for folder in folders]

    def ran_out_of_memory(self, replica_id: str) -> bool:
        """Tell whether the kernel has ended one of its processes for want of memory."""
        for folder in self._memory(replica_id):
            name = "memory.events" if self.memory == self.unified else "memory.oom_control"
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False

    def end(self, replica_id: str) -> None:
        """End every process in the replica's group."""
        with contextlib.suppress(OSError):
            (self._unified(replica_id) / "cgroup.kill").write_text("1")

    def remove(self, replica_id: str) -> bool:
        """End what is left, and take the groups away; False while something in them has not ended yet."""
        self.end(replica_id)
        gone = True
        for folder in [self._unified(replica_id), *self._memory(replica_id)]:
            try:
                folder.rmdir()
            except OSError as error:
                gone = gone and error.errno != errno.EBUSY
        return gone

    def _unified(self, replica_id: str) -> Path:
        return self.unified / f"{PREFIX}{replica_id}"

    def _memory(self, replica_id: str) -> list[Path]:
        return [] if self.memory is None else [self.memory / f"{PREFIX}{replica_id}"]


def enter(files: list[str]) -> None:
    """Put the calling process, which becomes a replica, into its groups."""
    for file in files:
        with contextlib.suppress(OSError), open(file, "w") as members:
            members.write("0")


def leave(files: list[str]) -> bool:
    """Take the calling process out of these groups, to those above them; whether it could."""
    try:
        for file in files:
            with open(Path(file).parents[1] / "cgroup.procs", "w") as members:
                members.write("0")
    except OSError:
        return False
    return True


def _own_groups(text: str) -> list[tuple[str, str]]:
    """(controller, path) of each hierarchy; version 2 has no name."""
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found += [(name, path) for name in controllers.split(",")]
    return found


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
