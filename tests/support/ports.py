"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import socket

import httpx2

from tests.support.waiting import until


class ReservedPort:
    """A port of the loopback device that nobody else is given while this lives.

    It is bound here and not listened on: the kernel gives it to nobody who asks for any port, and lets a server have it
    that sets SO_REUSEADDR, as servers do.
    """

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.number: int = self._held.getsockname()[1]

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._held.close()


def until_it_answers(url: str) -> None:
    """Wait for a server that is starting."""

    def answers() -> bool:
        try:
            httpx2.get(url, trust_env=False, verify=False)
            return True
        except httpx2.TransportError:
            return False

    until(answers)
