"""A way to the API server that can be closed: what comes is passed on, or waits as with a server that hangs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

CHUNK = 65536


class Gate:
    """``address`` is where it listens, as (host, port)."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener = listener
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self.address: tuple[str, int] = listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nothing passes any more; connections stay."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._open.wait()
        with contextlib.suppress(OSError):
            far = socket.create_connection(self._target)
            threading.Thread(target=self._pass_on, args=(far, near), daemon=True).start()
            self._pass_on(near, far)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._open.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def gate(host: str, target: tuple[str, int]) -> Iterator[Gate]:
    with socket.create_server((host, 0)) as listener:
        made = Gate(listener, target)
        try:
            yield made
        finally:
            made.open()
            # Wakes the thread that accepts.
            listener.shutdown(socket.SHUT_RDWR)
