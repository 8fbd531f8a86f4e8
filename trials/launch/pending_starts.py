"""Starts of replicas that take longer than whoever decides can wait: a process that forks them may hang.

Concurrency: one thread starts replicas, one after the other; the control loop's thread makes all calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

from trials.errors import LaunchFailed
from trials.launch.base import LaunchRequest, ReplicaProcess

WAIT_SECONDS = 0.25
"""What is started within this time is told at once; forks take a few milliseconds."""
PATIENCE_SECONDS = 2.0
"""Others wait behind one that takes long for this time, and then go past it: a machine that is busy is only slow."""


class PendingStarts:
    """``start`` runs in a thread; ``on_change``: called from there when one that was not waited for has ended."""

    def __init__(self, start: Callable[[LaunchRequest], ReplicaProcess], on_change: Callable[[], None]) -> None:
        self._start = start
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replica-start")
        self._pending: dict[str, tuple[float, Future[ReplicaProcess]]] = {}

    @property
    def are_slow(self) -> bool:
        """Whether one takes so long that others had better wait a moment for their turn."""
        return bool(self._pending) and not self.hang

    @property
    def hang(self) -> bool:
        now = time.monotonic()
        return any(now - since > PATIENCE_SECONDS for since, _ in self._pending.values())

    def begin(self, request: LaunchRequest) -> ReplicaProcess | None:
        """The process, or None while it is not known yet. Raises LaunchFailed."""
        start = self._thread.submit(self._start, request)
        try:
            return start.result(WAIT_SECONDS)
        except StillRunning:
            self._pending[request.replica_id] = time.monotonic(), start
            start.add_done_callback(lambda _: self._on_change())
            return None

    def ended(self, replica_id: str) -> ReplicaProcess | None:
        """The process of one that `begin` did not know, once it is there. Raises LaunchFailed where it cannot be."""
        pending = self._pending.get(replica_id)
        if pending is None:
            raise LaunchFailed(f"replica {replica_id} is not being started")
        start = pending[1]
        if not start.done():
            return None
        del self._pending[replica_id]
        return start.result()

    def close(self) -> None:
        """Nothing is started any more that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
