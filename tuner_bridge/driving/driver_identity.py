"""Who drives a study, told so that a later driver on the same machine can see whether that process is still there."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid

import psutil

CLOCK_SECONDS = 2.0
"""By so much two looks at the moment when a process began may differ."""


def driver_identity() -> str:
    """Another one at each call; at most 64 characters."""
    began = psutil.Process().create_time()
    return f"{_machine()}-{os.getpid()}-{began:.0f}-{uuid.uuid4().hex[:8]}"


def has_ended(identity: str) -> bool:
    """Whether that process was one of this machine, and is gone; False where that cannot be told."""
    parts = identity.split("-")
    if len(parts) != 4 or parts[0] != _machine() or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    try:
        there = psutil.Process(int(parts[1]))
        is_other = abs(there.create_time() - int(parts[2])) > CLOCK_SECONDS
        return is_other or there.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _machine() -> str:
    """The same for processes that see each other, of a container or of the machine since it was started, and only then.

    Where Linux does not tell it is another one each time: nobody is then known to have ended.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            words = platform.node(), boot.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return uuid.uuid4().hex[:16]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
