"""Command line and files of a user's code, in a replica that may be on another machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import uuid

COMMAND_LINE = "ELASTUNE_COMMAND_LINE"
"""Variable with the script's command line as a JSON list, for the replicas' ``sys.argv``."""
MOVED = "ELASTUNE_MOVED"
"""Names a folder and where it is found on this machine, as OLD=NEW."""
LOADED_BY = (COMMAND_LINE, MOVED)
"""Environment variables that decide which script a replica loads."""


def take_command_line() -> None:
    """Have ``sys.argv`` be that of the script that was started, where the trial says so."""
    words = os.environ.get(COMMAND_LINE)
    if words is not None:
        first, *rest = json.loads(words)
        sys.argv = [moved_path(first), *rest]


def moved_path(path: str) -> str:
    """Return where a path of the machine that the sweep was started on is found here."""
    old, _, new = os.environ.get(MOVED, "").partition("=")
    return moved(path, old, new) if old else path


def moved(path: str, old: str, new: str) -> str:
    """Return ``path`` with the leading folder ``old`` replaced by ``new``."""
    if path == old or path.startswith(old.rstrip("/") + "/"):
        return new.rstrip("/") + path[len(old.rstrip("/")) :]
    return path


def this_machine() -> str:
    """Name the machine since it was started, or the container, alike for processes that see each other.

    Where Linux does not tell it is another name each time: nobody is then known to be of one machine with anybody.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            words = platform.node(), boot.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return uuid.uuid4().hex[:16]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
