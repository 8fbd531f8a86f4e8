"""Waits that end when their group is broken off, whatever becomes of the operation that is waited for.

Gloo tells its operations that a connection was lost, except two kinds: those of which a part of the data has come or
gone already, and those whose data it was about to write when it found the connection closed. Nobody holds on to them,
so nobody can end them: they wait until their group's time is up, which is half an hour for replicas that may evaluate
meanwhile. Whoever waits for them goes on all the same; what belongs to them is left to its end.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOK = timedelta(seconds=0.2)
"""Interval between checks whether the group was aborted; a wait shorter than this is not checked."""

CONNECTIONS_ABORTED = "the connections between the replicas were aborted"


class Fuse:
    """One-time breaker for a group's collectives; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blown = False
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._waiting: dict[object, Callable[[], None]] = {}

    def blow(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """End all waits for operations of these groups, whose connections are closed."""
        with self._lock:
            self._groups = tuple(groups)
            self._blown = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for wake in waiting:
            wake()

    def wait(self, work: dist.Work) -> None:
        """Wait for one of Gloo's collectives. Raises RuntimeError if it failed or was broken off."""
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    # It failed, or has just succeeded.
                    work.wait()
                    return
                if self._blown:
                    raise self._given_up() from None

    def run(self, action: Callable[[], None]) -> None:
        """Run an action that waits for messages between two replicas.

        Raises its errors, or RuntimeError if broken off.
        """
        outcome: list[BaseException | None] = []
        ended = threading.Event()

        def carry_out() -> None:
            try:
                action()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            ended.set()

        threading.Thread(target=carry_out, name="elastune-transfer", daemon=True).start()
        self._wake_when_blown(ended, ended.set)
        ended.wait()
        self._forget(ended)
        if not outcome:
            raise self._given_up()
        if outcome[0] is not None:
            raise outcome[0]

    def settled(self, future: torch.futures.Future[Any]) -> torch.futures.Future[None]:
        """Done when ``future`` is, or the group is broken off: then ``future`` is not done."""
        either: torch.futures.Future[None] = torch.futures.Future()
        first = threading.Lock()

        def settle() -> None:
            if first.acquire(blocking=False):
                either.set_result(None)

        def give_up() -> None:
            if not future.done():
                self._given_up()
            settle()

        self._wake_when_blown(either, give_up)

        def finish(_: object) -> None:
            self._forget(either)
            settle()

        future.add_done_callback(finish)
        return either

    def _wake_when_blown(self, key: object, wake: Callable[[], None]) -> None:
        with self._lock:
            if not self._blown:
                self._waiting[key] = wake
                return
        wake()

    def _forget(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def _given_up(self) -> RuntimeError:
        """Return the error of a group that was given up.

        The group itself is kept: letting go of it waits for its operations.
        """
        with self._lock:
            groups, self._groups = self._groups, ()
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return RuntimeError(CONNECTIONS_ABORTED)
