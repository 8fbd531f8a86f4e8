"""Shipping from a node to its scheduler: a thread that looks for what there is, again and again and when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

SHIP_SECONDS = 1.0


class Shipping:
    """Concurrency: the thread calls ``ship``; whatever it shares with the agent's own is guarded by ``_lock``."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin_shipping(self) -> None:
        self._thread.start()

    def ship(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._over = True
        self._news.set()

    def _run(self) -> None:
        while not self._over:
            self._news.wait(SHIP_SECONDS)
            self._news.clear()
            self.ship()


LARGEST_PART = 256 * 1024

Send = Callable[[str, int, bytes], int | None]
"""Sends a part of a replica's log, which begins at that byte; how many bytes the scheduler has, None if it is away."""


class LogShipping(Shipping):
    def __init__(self, log_of: Callable[[str], Path], send: Send, on_arrival: Callable[[], None]) -> None:
        super().__init__("logs")
        self._log_of = log_of
        self._send = send
        self._on_arrival = on_arrival
        self._sent: dict[str, int] = {}
        self._ended: set[str] = set()
        self._fully_shipped: set[str] = set()
        """Ended, and all that they have printed has arrived."""
        self.begin_shipping()

    def begin(self, replica_id: str) -> None:
        with self._lock:
            self._sent.setdefault(replica_id, 0)

    def has_whole(self, replica_id: str) -> bool:
        """Asked when the replica has ended: whether all that it has printed has arrived."""
        with self._lock:
            if replica_id not in self._sent:
                return True
            self._ended.add(replica_id)
            whole = replica_id in self._fully_shipped
        if not whole:
            self._news.set()
        return whole

    def forget(self, replica_id: str) -> None:
        with self._lock:
            self._sent.pop(replica_id, None)
            self._ended.discard(replica_id)
            self._fully_shipped.discard(replica_id)

    def ship(self) -> None:
        with self._lock:
            open_logs = [name for name in self._sent if name not in self._fully_shipped]
        for name in open_logs:
            self._ship(name)

    def _ship(self, name: str) -> None:
        with self._lock:
            at, ended = self._sent.get(name), name in self._ended
        while at is not None:
            try:
                with open(self._log_of(name), "rb") as file:
                    file.seek(at)
                    part = file.read(LARGEST_PART)
            except OSError:
                part = b""
            if part:
                have = self._send(name, at, part)
                if have is None:
                    return
                at = have
                with self._lock:
                    if name in self._sent:
                        self._sent[name] = have
                continue
            if ended:
                with self._lock:
                    self._fully_shipped.add(name)
                self._on_arrival()
            return
