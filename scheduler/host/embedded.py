"""A scheduler of one's own: a child process on loopback that owns this machine's slots and ends with its owner.

If it dies while its owner lives, ``ensure`` starts another on the same folder, which adopts the replicas that train.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerDidNotStart

STARTS = 3
LONGEST_END_SECONDS = 130.0
"""Seconds for replicas to save, and for jobs of a queue to be taken back."""


class EmbeddedScheduler:
    def __init__(
        self,
        state_dir: Path,
        *,
        fork_server: bool = True,
        preload: Sequence[str] = ("torch",),
        environ: Mapping[str, str] = MappingProxyType({}),
        **slots: float | str | None,
    ) -> None:
        """``preload``: modules that replicas import; it has them in memory when the first one starts.

        ``environ``: variables beside those of this process, which such modules go by. ``slots``: options of
        `elastune up` that say what slots it has, such as ``gpus_per_slot``.
        """
        self.state_dir = state_dir
        self._environ = dict(environ)
        self._arguments = ["--state-dir", str(state_dir)]
        for name, value in slots.items():
            if value is not None:
                self._arguments += [f"--{name.replace('_', '-')}", str(value)]
        self._arguments += ["--preload", ",".join(preload)]
        if not fork_server:
            self._arguments += ["--no-fork-server"]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> SchedulerClient:
        """Start the process and wait until it answers; raises SchedulerDidNotStart with its own words.

        One that was killed meanwhile is started again.
        """
        for _ in range(STARTS - 1):
            try:
                return self._start()
            except SchedulerDidNotStart:
                if self._process is None or (self._process.returncode or 0) >= 0:
                    raise
        return self._start()

    def _start(self) -> SchedulerClient:
        self._let_go()
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SchedulerDidNotStart(
                f"the state folder {self.state_dir} cannot be created: {error}; name another one with state_dir="
            ) from error
        log_path = self.state_dir / "scheduler.log"
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, **self._environ, "PYTHONPATH": path}
        with open(log_path, "a") as log:
            began = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scheduler.cli", "up", "--embedded", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=environ,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._let_go()
            with open(log_path) as log:
                log.seek(began)
                words = log.read().strip().splitlines()
            raise SchedulerDidNotStart(words[-1] if words else f"the scheduler exited immediately; see {log_path}")
        announced = json.loads(line)
        return SchedulerClient(announced["url"], announced["token"])

    def ensure(self, client: SchedulerClient) -> SchedulerClient:
        """Return the client, or a new one after restarting a scheduler that has died."""
        with self._lock:
            if self._stopped or (self._process is not None and self._process.poll() is None):
                return client
            return self.start()

    def _let_go(self) -> None:
        """Close the pipes to a process that is gone."""
        for pipe in () if self._process is None else (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def stop(self) -> None:
        """Close the pipe: the scheduler lets its trials save, and ends."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        deadline = time.monotonic() + LONGEST_END_SECONDS
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._let_go()
