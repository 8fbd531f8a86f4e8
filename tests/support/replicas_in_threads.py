"""A launcher whose replicas are threads of this process: everything of a trial but the process.

The code of a replica and its requests are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dist_core.link.environment import ReplicaEnvironment
from dist_core.trial.current import presenting
from dist_core.trial.replica import Replica
from trials.launch import InMemoryLauncher, LaunchRequest
from trials.launch.base import Exit, ReplicaProcess
from trials.record import ReplicaRecord

Run = Callable[[Replica], int]
"""What a replica does with its core; its exit status."""


class ThreadLauncher(InMemoryLauncher):
    def __init__(self, run: Run) -> None:
        super().__init__({"localhost": 1})
        self._run = run
        self.on_change: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []
        self._ending = threading.Lock()
        """A replica has not ended before it is known how."""

    def is_ready_for(self, request: LaunchRequest) -> bool:
        return True

    def launch(self, request: LaunchRequest) -> ReplicaProcess | None:
        started = super().launch(request)
        thread = threading.Thread(target=self._live, args=(request,), name=request.replica_id, daemon=True)
        self._threads.append(thread)
        thread.start()
        return started

    def _live(self, request: LaunchRequest) -> None:
        core = Replica(ReplicaEnvironment.from_environ(request.environ))
        assert core.membership is not None
        # A replica that does not leave in time is ended; this one is not alone in its process.
        core.membership._end = lambda status: None
        status = 1
        try:
            with presenting(core):
                status = self._run(core)
            core.close()
        finally:
            with self._ending:
                self.end(request.replica_id, status)
            self.on_change()
        # A process would be gone by now, and its connections with it.
        core.membership._thread.join()
        assert core.channel is not None
        core.channel.close()
        core.channel.let_go_if_closed()

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        with self._ending:
            return super().exits(replicas)

    def close(self) -> None:
        """When the scheduler does not answer any more."""
        for thread in self._threads:
            thread.join(timeout=20.0)
        super().close()
