"""A sweep whose trials are to live in a team's namespace says so, and its names are that namespace's."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.client.connection import SchedulerClient
from scheduler.errors import RequestRefused
from tuner_bridge.driving.study_driver import StudyDriver


def asked_for(monkeypatch: pytest.MonkeyPatch, namespace: str) -> tuple[str, dict[str, Any]]:
    """Path and body with which the driver attaches."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def request(method: str, path: str, body: Any = None, **options: Any) -> Any:
        seen.append((path, body))
        raise RequestRefused("enough")

    client = SchedulerClient("http://127.0.0.1:9", "a token that nobody knows")
    monkeypatch.setattr(client, "request", request)
    monkeypatch.setenv("ELASTUNE_NAMESPACE", namespace)
    driver = StudyDriver("resnet-1", "minimize", client, reconnect=lambda client: client, title="resnet")
    with pytest.raises(RequestRefused):
        driver.attach({"yields_to": ["net"], "weight": 2.0})
    client.close()
    return seen[0]


def test_names_of_a_study_are_those_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = asked_for(monkeypatch, "team")
    assert path == "/studies/team.resnet-1"
    assert (body["title"], body["namespace"]) == ("team.resnet", "team")
    assert body["terms"] == {"yields_to": ["team.net"], "weight": 2.0}


def test_without_a_namespace_names_are_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = asked_for(monkeypatch, "")
    assert (path, body["title"], "namespace" in body) == ("/studies/resnet-1", "resnet", False)
    assert body["terms"]["yields_to"] == ["net"]
