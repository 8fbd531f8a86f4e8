"""A thread that does jobs one after another, in the order in which they were asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class JobLine:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """The first one starts the thread. A job tells of its errors itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"elastune-{self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """What was asked for is done; nothing is asked for any more."""
        self._jobs.put(None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            job()
            # Nothing of a job outlives it here: the next one may be long in coming.
            del job
