"""Strangers and replicas that ask too much: refused early, by a few words, while others are served."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api import connections
from scheduler.api.bodies import DEEPEST, nested_deeper
from scheduler.api.gate import BURST, REQUESTS_A_SECOND, SMALL_BYTES, Rates
from scheduler.client.connection import SchedulerClient
from scheduler.policy import policy_by_name
from tests.support.served import OWNERS_TOKEN, ServedLoop
from tests.support.site import TOKENS, Site
from trials.launch import InMemoryLauncher
from trials.store import sql_store


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedLoop]:
    store = sql_store(f"sqlite:///{tmp_path / 'trials.db'}")
    loop = ServedLoop(tmp_path, store, InMemoryLauncher({"n0": 1}), policy_by_name("fifo"))
    loop.wait_until_it_answers()
    yield loop
    loop.close()
    store.close()


def connect(served: ServedLoop) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def answer(connection: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def asked(connection: socket.socket, request: bytes) -> bytes:
    """The answer on a connection that stays, to a question whose answer is an empty list."""
    connection.sendall(request)
    received = b""
    while not received.endswith(b"[]"):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


# ---------------------------------------------------------------------- what is read, and of whom


@pytest.mark.parametrize("authorization", ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic eA==\r\n"])
@pytest.mark.parametrize("body", ["Content-Length: 400000000\r\n", "Transfer-Encoding: chunked\r\n"])
def test_a_strangers_body_is_not_waited_for(served: ServedLoop, authorization: str, body: str) -> None:
    with connect(served) as connection:
        connection.sendall(f"POST /trials HTTP/1.1\r\nHost: x\r\n{authorization}{body}\r\n".encode())
        assert answer(connection).startswith(b"HTTP/1.1 401")


def test_malformed_json_of_a_stranger_is_a_strangers(site: Site) -> None:
    for path in ("/trials", "/studies/s/news", "/replica/call"):
        refused = site.http.post(path, content=b"{" * 1000, headers={"Authorization": "Bearer wrong"})
        assert refused.status_code in (401, 403)
        assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/studies/s/poke", "/studies/s", "/replica/hints", "/replica/warning"])
def test_a_body_that_is_too_large_is_refused(site: Site, path: str) -> None:
    name = site.with_replica()
    token = TOKENS.for_replica(name) if path.startswith("/replica") else TOKENS.owner
    headers = {"Authorization": f"Bearer {token}", "X-Elastune-Replica": name}
    assert site.http.post(path, content=b" " * (SMALL_BYTES + 1), headers=headers).status_code == 413
    chunks = (b" " * 65536 for _ in range(SMALL_BYTES // 65536 + 1))
    assert site.http.post(path, content=chunks, headers=headers).status_code == 413


def test_what_a_trial_brings_may_be_large(site: Site) -> None:
    payload = {"array": "x" * (20 * 2**20)}
    submitted = site.call("POST", "/trials", {"study": "s", "number": 0, "entrypoint": "m:f", "payload": payload})
    assert submitted.status_code == 200


def test_json_that_is_nested_too_deep_is_refused(site: Site) -> None:
    name = site.with_replica()
    value: Any = 1
    for _ in range(DEEPEST):
        value = [value]
    refused = site.replica("POST", "/call", {"id": "q", "method": "m", "arguments": {"value": value}}, name=name)
    assert refused.status_code == 422
    assert f"nested more than {DEEPEST} deep" in refused.json()["detail"]


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_depth_is_that_of_the_json(value: Any) -> None:
    def depth(each: Any) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = json.dumps(value).encode()
    assert not nested_deeper(body, depth(value))
    assert depth(value) == 0 or nested_deeper(body, depth(value) - 1)


# ---------------------------------------------------------------------- how often


def test_a_replica_that_calls_without_end_is_slowed_down_to_its_rate() -> None:
    rates = Rates()
    now = 0.0
    for _ in range(5000):
        now += rates.delay("a", now)
    assert now == pytest.approx((5000 - BURST) / REQUESTS_A_SECOND, rel=0.01)
    assert rates.delay("b", now) == 0.0
    assert rates.delay("a", now + BURST / REQUESTS_A_SECOND + 1.0) == 0.0


# ---------------------------------------------------------------------- connections


def test_a_request_that_never_ends_its_head_is_hung_up_on(served: ServedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with connect(served) as silent, connect(served) as dripping:
        dripping.sendall(b"GET /trials HTTP/1.1\r\nHost: x\r\n")
        assert answer(silent) == b""
        assert answer(dripping) == b""


def test_the_next_request_of_a_known_connection_has_to_end_its_head_too(
    served: ServedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with connect(served) as connection:
        request = f"GET /studies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OWNERS_TOKEN}\r\n\r\n".encode()
        for _ in range(2):
            # Idle in between for longer than that, which is no offence.
            assert asked(connection, request).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)
        connection.sendall(request[:30])
        assert answer(connection) == b""


def test_strangers_make_room_and_those_with_a_token_stay(served: ServedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    with connect(served) as known, ExitStack() as stack:
        request = f"GET /studies HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OWNERS_TOKEN}\r\n\r\n".encode()
        assert asked(known, request).startswith(b"HTTP/1.1 200")
        strangers = [stack.enter_context(connect(served)) for _ in range(60)]
        with closing(SchedulerClient(served.url, OWNERS_TOKEN)) as newcomer:
            newcomer.check()
        assert asked(known, request).startswith(b"HTTP/1.1 200")
        hung_up = [stranger for stranger in strangers if hangs_up(stranger)]
        assert 40 <= len(hung_up) <= 45


def hangs_up(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_many_slow_connections_leave_others_served(served: ServedLoop) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(served)).sendall(b"POST /trials HTTP/1.1\r\nContent-Le")
        with closing(served.client()) as client, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: client.check(), range(200)))


def test_descriptors_are_taken_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 20000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    connections.raise_descriptor_limit()
    assert limits[-1] == (20000, 20000)
    assert 64 < connections.most_connections() < 20000
