"""What is sent from a node to its scheduler as it comes: a thread that looks for it, again and again and when asked."""

from __future__ import annotations

import threading

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
        """Send what there is."""
        raise NotImplementedError

    def close(self) -> None:
        self._over = True
        self._news.set()

    def _run(self) -> None:
        while not self._over:
            self._news.wait(SHIP_SECONDS)
            self._news.clear()
            self.ship()
