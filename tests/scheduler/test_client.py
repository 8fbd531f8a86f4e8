"""What the client makes of each kind of answer."""

from __future__ import annotations

import httpx2
import pytest

from scheduler.client.connection import SchedulerClient
from scheduler.errors import NotAuthorized, RequestRefused, SchedulerError, SchedulerUnreachable


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (httpx2.Response(404, json={"detail": "no study is called 'x'"}), RequestRefused, "no study is called 'x'"),
        (httpx2.Response(401, json={"detail": "the token is not"}), NotAuthorized, "refused the token: the token is"),
        (httpx2.Response(503, json={"detail": "the disk is full"}), SchedulerUnreachable, "the disk is full"),
        (httpx2.Response(502), SchedulerUnreachable, "cannot work now: HTTP status 502"),
        (httpx2.Response(404), SchedulerUnreachable, "not an Elastune scheduler: HTTP status 404"),
        (httpx2.Response(403, text="<html>denied"), SchedulerUnreachable, "correct ELASTUNE_URL, or look at the proxy"),
    ],
)
def test_a_refusal_is_told_from_a_scheduler_that_is_away(
    answer: httpx2.Response, kind: type[SchedulerError], words: str
) -> None:
    """One is final; while a scheduler is away, or a gateway answers in its place, sweeps wait and ask again."""
    client = SchedulerClient("http://scheduler", "secret", transport=httpx2.MockTransport(lambda _: answer))
    with pytest.raises(kind, match=words):
        client.request("POST", "/studies/x/answers", {})
