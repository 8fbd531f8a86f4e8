"""What the client makes of each kind of answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scheduler.client.carriers import Answer, Carrier, Request
from scheduler.client.connection import SchedulerClient
from scheduler.errors import NotAuthorized, RequestRefused, SchedulerError, SchedulerUnreachable


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(404, b'{"detail": "no study is called x"}'), RequestRefused, "no study is called x"),
        (Answer(401, b'{"detail": "the token is not"}'), NotAuthorized, "refused the token: the token is"),
        (Answer(503, b'{"detail": "the disk is full"}'), SchedulerUnreachable, "the disk is full"),
        (Answer(502, b""), SchedulerUnreachable, "cannot answer: HTTP status 502"),
        (Answer(404, b""), SchedulerUnreachable, "not an Elastune scheduler: HTTP status 404"),
        (
            Answer(200, b"<html>welcome"),
            SchedulerUnreachable,
            "not an Elastune scheduler: HTTP status 200",
        ),
        (Answer(403, b"<html>denied"), SchedulerUnreachable, "correct ELASTUNE_URL, or check the proxy"),
    ],
)
def test_a_refusal_is_told_from_a_scheduler_that_is_away(
    answer: Answer, kind: type[SchedulerError], words: str
) -> None:
    """One is final; while a scheduler is away, or a gateway answers in its place, sweeps wait and ask again."""

    class Answering(Carrier):
        def ask(self, request: Request) -> Answer:
            return answer

    client = SchedulerClient("http://scheduler", "secret", carrier=Answering("http://scheduler"))
    with pytest.raises(kind, match=words):
        client.request("POST", "/studies/x/answers", {})


class Echo(BaseHTTPRequestHandler):
    """Tells what it was asked; what has ``once`` in it is the last that its connection is for."""

    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = [self.command, self.path, sent.decode(), self.headers["Authorization"], self.headers["Content-Type"]]
        said = json.dumps(asked).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        if "last" in self.path:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(said)
        # Without a word to the client, as a server does that has waited long enough.
        self.close_connection = "once" in self.path

    def log_message(self, *words: Any) -> None: ...


for method in ("GET", "PUT", "POST", "DELETE"):
    setattr(Echo, f"do_{method}", Echo.do)


@pytest.fixture
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/below"
        server.shutdown()
        thread.join()


@pytest.fixture
def client(echo: str) -> Iterator[SchedulerClient]:
    made = SchedulerClient(echo, "secret")
    yield made
    made.close()


def test_what_is_asked_arrives(client: SchedulerClient) -> None:
    bearer = "Bearer secret"
    for _ in range(2):
        assert client.request("GET", "/rows", params={"study": "a b&c", "last": 3, "all": True}) == [
            "GET", "/below/rows?study=a+b%26c&last=3&all=true", "", bearer, None
        ]  # fmt: skip
        body = {"x": [1, "ü"], "none": None}
        asked = client.request("POST", "/trials", body)
        assert json.loads(asked.pop(2)) == body
        assert asked == ["POST", "/below/trials", bearer, "application/json"]
        client.send("/packages/1", b"bytes")
        assert client.request("POST", "/poke")[2] == ""
        assert client.request("GET", "/last")[1] == "/below/last"
        # The next question finds its connection closed.
        assert client.request("DELETE", "/once")[:2] == ["DELETE", "/below/once"]
        time.sleep(0.05)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:port", "http://", "ftp://127.0.0.1"])
def test_nobody_is_said(url: str) -> None:
    with pytest.raises(SchedulerUnreachable, match="no scheduler answers at"):
        SchedulerClient(url, "secret").request("GET", "/rows")


def test_threads_that_ask_at_once_share_connections_and_all_are_closed(client: SchedulerClient) -> None:
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda number: client.request("GET", f"/{number}")[1], range(100)))
    assert paths == [f"/below/{number}" for number in range(100)]
    client.close()
    assert client.request("GET", "/behind")[1] == "/below/behind"


def test_what_is_no_number_in_json_is_not_sent(client: SchedulerClient) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        client.request("POST", "/trials", {"x": float("nan")})
