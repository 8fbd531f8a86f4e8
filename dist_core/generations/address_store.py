"""A c10d store kept by the scheduler: where the replicas of a generation exchange their addresses.

It lives outside the replicas, so a new generation can form whichever of them are left, and it needs no port of its
own: each key is a request on the control channel that exists anyway. Only the few keys of a group's construction pass
through it.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from datetime import timedelta

from dist_core.errors import ControlChannelError
from dist_core.link.client import ControlChannel
from dist_core.torch_private import Store

POLL_SECONDS = 10.0


class AddressStore(Store):
    """Keys of one meeting: of a generation, or of the processes of a replica.

    ``cancel`` makes every waiting call raise, so that an abandoned group can be dropped.
    """

    def __init__(self, channel: ControlChannel, meeting: Mapping[str, int | str], timeout: timedelta) -> None:
        super().__init__()
        self._channel = channel
        self._meeting = dict(meeting)
        self._called = " ".join(f"{name} {value}" for name, value in meeting.items())
        self._timeout = timeout
        self._known: dict[str, bytes] = {}
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        body = {**self._meeting, "key": key, "value": base64.b64encode(data).decode()}
        self._channel.request("PUT", "/rendezvous", body)

    def get(self, key: str) -> bytes:
        if key not in self._known:
            waited = 0.0
            while key not in self._known:
                if self._cancelled.is_set():
                    raise ControlChannelError(f"{self._called} was abandoned")
                if waited >= self._timeout.total_seconds():
                    raise TimeoutError(f"no replica published {key!r} of {self._called}")
                answer = self._channel.request(
                    "GET",
                    "/rendezvous",
                    params={**self._meeting, "key": key, "wait": POLL_SECONDS},
                )
                waited += POLL_SECONDS
                if answer["value"] is not None:
                    self._known[key] = base64.b64decode(answer["value"])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)
