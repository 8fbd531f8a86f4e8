"""The folder a scheduler owns: its lock, its token, and the file that tells others where it listens.

lock          held (flock) while a scheduler runs; names its pid
.gitignore    of all that is in it
server.json   address and pid of the scheduler that runs, or ran last
token         the owner's token, readable by its owner only
trials.db     the store
logs/         one file a replica, by trial
checkpoints/  of trials that are not over
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trials.errors import StateFolderInUse, StoreUnavailable

DATABASE = "trials.db"
ENDING_SECONDS = 70.0
"""Longest wait for a scheduler that is ending to let go of its folder."""


@dataclass(slots=True)
class StateFolder:
    path: Path
    _lock: IO[str] | None = None

    @classmethod
    def acquire(cls, path: Path, *, patience_seconds: float = ENDING_SECONDS) -> StateFolder:
        """Own the folder; raises StateFolderInUse with the owner's pid and address, or StoreUnavailable.

        A scheduler that is about to end, because its sweep did, is waited for.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return cls._acquire_now(path)
            except StateFolderInUse:
                ending = (read_server_file(path) or {}).get("ending", False)
                if not ending or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    @classmethod
    def _acquire_now(cls, path: Path) -> StateFolder:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = open(path / "lock", "a+")
            # It has tokens, and often lies in somebody's repository.
            if not (path / ".gitignore").exists():
                (path / ".gitignore").write_text("*\n")
        except OSError as error:
            raise StoreUnavailable(f"the state folder {path} cannot be used: {error}; choose another") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            server = read_server_file(path) or {}
            raise StateFolderInUse(
                f"the state folder {path} belongs to a running scheduler (pid {server.get('pid', 'unknown')} at "
                f"{server.get('url', 'an unknown address')}); set ELASTUNE_URL to use it, stop it, or "
                "choose another folder"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        return cls(path, lock)

    @property
    def server_file(self) -> Path:
        return self.path / "server.json"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.path.resolve() / DATABASE}"

    def write_server_file(self, url: str, *, ending: bool = False) -> None:
        partial = self.path / f"server.json.{os.getpid()}"
        partial.write_text(json.dumps({"url": url, "pid": os.getpid(), "ending": ending}))
        os.replace(partial, self.server_file)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def is_held(path: Path) -> bool:
    """Tell whether a scheduler runs on the folder."""
    try:
        with open(path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder_of(path: Path) -> int | None:
    """Return the process that holds the folder; None where none does, or it has not said so yet."""
    try:
        words = (path / "lock").read_text().strip()
    except OSError:
        return None
    return int(words) if is_held(path) and words.isdigit() else None


def read_server_file(path: Path) -> dict[str, Any] | None:
    """Return where the folder's scheduler runs, or ran last; None if none ever did."""
    try:
        document: dict[str, Any] = json.loads((path / "server.json").read_text())
        return document
    except (OSError, ValueError):
        return None


def write_durably(path: Path, words: str) -> None:
    """Write a file whole or not at all, for its owner alone; raise StoreUnavailable."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(words)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be written: {error}") from error
