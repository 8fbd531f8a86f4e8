"""A replica's requests: what stands in the scheduler's place stops nothing, what the scheduler refuses is final."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from dist_core.errors import ControlChannelError
from dist_core.link import client as channel_module
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from dist_core.link.refusals import refusal
from tests.support.channel import REPLICA, channel_to


def channel_with(answers: list[httpx2.Response]) -> ControlChannel:
    return channel_to(lambda _: answers.pop(0))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"detail": "no trial is called \'t\'"}', "no trial is called 't'"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"", None),
        (b"default backend - 404", None),
        (b"[1]", None),
        (b'{"message": "not here"}', None),
        (b"\xff\xfe", None),
    ],
)
def test_only_the_scheduler_gives_a_reason(content: bytes, reason: str | None) -> None:
    assert refusal(content) == reason


def test_a_request_that_a_gateway_answered_is_sent_again() -> None:
    channel = channel_with([httpx2.Response(404), httpx2.Response(403, text="denied"), httpx2.Response(200, json=[7])])
    assert channel.request("GET", "/watch") == [7]


def test_a_refusal_is_final_and_has_its_status_and_reason() -> None:
    channel = channel_with([httpx2.Response(410, json={"detail": "the trial is over"}), httpx2.Response(200)])
    with pytest.raises(ControlChannelError, match="refused GET /watch: the trial is over") as caught:
        channel.request("GET", "/watch")
    assert caught.value.status == 410


def test_a_file_is_not_written_from_what_a_gateway_says(tmp_path: Path) -> None:
    channel = channel_with([httpx2.Response(404, text="nothing here"), httpx2.Response(200, content=b"the package")])
    channel.download("/package", tmp_path / "package")
    assert (tmp_path / "package").read_bytes() == b"the package"


def test_what_is_wrong_with_single_fields_is_told_in_words() -> None:
    step = {"type": "less_than_equal", "loc": ["body", "step"], "msg": "Input should be at most 5", "input": 7}
    whole = {"type": "json_invalid", "loc": ["body"], "msg": "not JSON"}
    assert refusal(json.dumps({"detail": [step, whole]}).encode()) == (
        "step: Input should be at most 5 (it is 7); the request: not JSON"
    )
    assert refusal(b'{"detail": [3]}') == "[3]"
    assert refusal(b'{"detail": [{"loc": 5, "msg": "x"}]}') == "the request: x"


# ---------------------------------------------------------------------- a replica's line to its scheduler


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
