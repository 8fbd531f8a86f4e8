"""A replica's line to its scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from dist_core.link import client as channel_module
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from tests.support.channel import REPLICA


def test_a_token_in_a_file_is_read_again_when_it_may_have_been_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    now, shown = [100.0], list[str]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        shown.append(request.headers["authorization"])
        return httpx2.Response(200, json={})

    monkeypatch.setattr("dist_core.link.client.time.monotonic", lambda: now[0])
    environment = replace(REPLICA, token="", token_file=file)
    assert ReplicaEnvironment.from_environ(environment.to_environ()) == environment
    line = ControlChannel(environment, transport=httpx2.MockTransport(answer))
    line.request("GET", "/trial")
    file.write_text("second\n")
    line.request("GET", "/trial")
    now[0] += channel_module.TOKEN_SECONDS + 1.0
    line.request("GET", "/trial")
    file.unlink()
    now[0] += channel_module.TOKEN_SECONDS + 1.0
    line.request("GET", "/trial")
    assert shown == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]


def test_a_token_is_not_shown_with_the_environment() -> None:
    assert "secret" not in repr(REPLICA)
