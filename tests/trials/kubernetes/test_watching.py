"""Where a watch goes on: with the real informer, against a server that plays a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from trials.kubernetes.client.api import PODS
from trials.kubernetes.client.watching import Watched


def pod(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "resourceVersion": version, "managedFields": ["much"]}}


class Stream:
    """A watch's answer: its events, and then the connection breaks."""

    def __init__(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        self._events = events

    def stream(self, **_: Any) -> Iterator[bytes]:
        for kind, document in self._events:
            yield json.dumps({"type": kind, "object": document}).encode() + b"\n"

    def close(self) -> None:
        pass

    def release_conn(self) -> None:
        pass


class Answer:
    status = 200

    def __init__(self, response: Stream) -> None:
        self.response = response


class Server:
    def __init__(self, streams: list[list[tuple[str, dict[str, Any]]]]) -> None:
        self._streams = streams
        self.asked_from: list[str] = []
        self.done = threading.Event()
        self._for_ever = threading.Event()

    def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        return {"items": [pod("old", "7"), pod("older", "5")], "metadata": {"resourceVersion": "100"}}

    def raw(self, method: str, path: str, *, query: dict[str, str], timeout: Any) -> Answer:
        self.asked_from.append(query["resourceVersion"])
        if not self._streams:
            self.done.set()
            self._for_ever.wait()
        return Answer(Stream(self._streams.pop(0)))


def test_a_watch_goes_on_from_the_list_and_then_from_what_was_heard_last() -> None:
    server: Any = Server(
        [
            [("MODIFIED", pod("old", "105")), ("DELETED", pod("older", "107"))],
            [("BOOKMARK", {"metadata": {"resourceVersion": "120"}})],
            [],
        ]
    )
    heard: list[str] = []
    gone: list[str] = []
    watched = Watched(
        server,
        PODS,
        heard=lambda document: heard.append(document["metadata"]["resourceVersion"]),
        gone=lambda document: gone.append(document["metadata"]["name"]),
    )
    watched.start()
    assert server.done.wait(20.0)
    assert server.asked_from == ["100", "107", "120", "120"]
    assert (heard, gone) == (["7", "5", "105"], ["older"])
    (kept,) = watched.objects()
    assert "managedFields" not in kept["metadata"]
