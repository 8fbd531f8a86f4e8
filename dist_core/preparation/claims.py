"""Claims: which of several processes, perhaps on several machines, makes a part that all of them want.

A claim is a file that its holder keeps touching. One that nobody has touched for long, or whose process on this machine
is gone, is nobody's. Two may come to hold the same claim after such a loss; then a part is made twice, and is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

TOUCH_SECONDS = 2.0
STALE_SECONDS = 30.0


class Claims:
    """Over the files of one folder, which all have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._claimant = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}

    @contextmanager
    def holding(self, name: str) -> Iterator[bool]:
        """Yield whether this process has the claim, and let it go afterwards."""
        path = self._folder / f"{name}.claim"
        if not self._take(path):
            yield False
            return
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(path, over), name=f"elastune-claim-{name}", daemon=True)
        keeper.start()
        try:
            yield True
        finally:
            over.set()
            keeper.join()
            path.unlink(missing_ok=True)

    def _take(self, path: Path) -> bool:
        if path.exists():
            if not self._is_nobodys(path):
                return False
            path.unlink(missing_ok=True)
        try:
            with open(path, "x") as file:
                json.dump(self._claimant, file)
        except FileExistsError:
            return False
        return True

    def _is_nobodys(self, path: Path) -> bool:
        try:
            holder = json.loads(path.read_text())
            age = self._now() - path.stat().st_mtime
        except FileNotFoundError:
            return True
        except ValueError:
            # It is being written.
            return False
        if age > STALE_SECONDS:
            return True
        if holder.get("host") != self._claimant["host"]:
            return False
        try:
            began = float(psutil.Process(holder["pid"]).create_time())
        except psutil.NoSuchProcess:
            return True
        # Another process may have got its number since.
        return abs(began - float(holder["began"])) > 1.0

    def _now(self) -> float:
        """Return the time by the clock that the files' times are of."""
        probe = self._folder / f"clock-{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    @staticmethod
    def _keep(path: Path, over: threading.Event) -> None:
        while not over.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(path)
