"""What the webhook answers to the API server."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from scheduler.kubernetes.admission import review
from scheduler.kubernetes.server import REVIEW_BYTES, review_app
from scheduler.loop.loop_thread import STUCK_SECONDS
from trials.kubernetes.settings import ClusterSettings

SETTINGS = ClusterSettings(namespace="home", namespaces=("team",), slot={"nvidia.com/gpu": "1", "cpu": "4"})
SNEAKS = {
    "spec": {"containers": [{"name": "replica", "volumeMounts": [{"name": "elastune-state", "mountPath": "/a"}]}]}
}


def two_gpus(where: str = "containers") -> dict[str, Any]:
    return {"spec": {where: [{"name": "replica", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}}


def asked(spec: dict[str, Any], *, kind: str = "Trial", name: str = "x", before: Any = None) -> dict[str, Any]:
    document = {"metadata": {"name": name}, "spec": spec}
    old = None if before is None else {"metadata": {"name": name}, "spec": before}
    return {"request": {"uid": "u", "kind": {"kind": kind}, "object": document, "oldObject": old}}


def objection(**arguments: Any) -> str | None:
    answer = review(asked(**arguments), SETTINGS)["response"]
    assert answer["uid"] == "u"
    assert answer["allowed"] is ("status" not in answer)
    return None if answer["allowed"] else str(answer["status"]["message"])


def test_what_makes_sense_is_let_in() -> None:
    assert objection(spec={"command": ["python", "x.py"], "maxReplicas": 4}) is None
    assert objection(spec={"weight": 2.0, "quota": 3}, kind="Study") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"spec": {"command": ["x"], "minReplicas": 4, "maxReplicas": 2}},
            "spec.minReplicas is 4 but spec.maxReplicas",
        ),
        ({"spec": {"command": ["x"], "wrong": 1}}, "spec.wrong is not known"),
        ({"spec": {"command": ["x"]}, "name": "x" * 60}, "metadata.name"),
        ({"spec": {"command": ["x"], "template": {"containers": []}}}, "spec.template must be a pod template"),
        (
            {"spec": {"command": ["x"], "template": two_gpus()}},
            "spec.template: its pod template requests 2 of nvidia.com/gpu for a replica, but a slot has 1",
        ),
        ({"spec": {"template": two_gpus("initContainers")}, "kind": "Study"}, "requests 2 of nvidia.com/gpu"),
        (
            {"spec": {"command": ["x"], "template": {"spec": {"containers": "x"}}}},
            "spec.template is not a valid pod template",
        ),
        (
            {"spec": {"command": ["x"], "template": SNEAKS}},
            "spec.template: its pod template names the volume 'elastune-",
        ),
        ({"spec": {"template": SNEAKS}, "kind": "Study"}, "names the volume 'elastune-state'"),
        (
            {"spec": {"command": ["x"], "study": "team.s"}},
            "'team.s' begins with the prefix of studies of namespace team",
        ),
        ({"spec": {"name": "team.s"}, "kind": "Study"}, "'team.s' begins with"),
        ({"spec": {"weight": 0}, "kind": "Study"}, "weight is 0"),
        ({"spec": {"goal": "deadline"}, "kind": "Study"}, "needs a deadline"),
    ],
)
def test_what_does_not_is_refused_and_the_field_named(arguments: dict[str, Any], words: str) -> None:
    message = objection(**arguments)
    assert message is not None
    assert words in message


def test_a_trial_that_is_there_may_be_scaled_and_not_become_another() -> None:
    before = {"command": ["x"], "maxReplicas": 2}
    assert objection(spec={"command": ["x"], "maxReplicas": 8}, before=before) is None
    message = objection(spec={"command": ["y"], "maxReplicas": 2}, before=before)
    assert message is not None
    assert message.startswith("spec.payload was")


def test_what_made_no_sense_can_be_mended_labelled_and_deleted() -> None:
    broken = {"command": ["x"], "minReplicas": 2, "maxReplicas": 1}
    assert objection(spec=broken, before=broken) is None
    assert objection(spec={**broken, "maxReplicas": 2}, before=broken) is None
    assert objection(spec={**broken, "maxReplicas": 0}, before=broken) is not None


def test_deletions_pass() -> None:
    answer = review(
        {"request": {"uid": "u", "kind": {"kind": "Trial"}, "operation": "DELETE", "object": None}}, SETTINGS
    )
    assert answer["response"]["allowed"]


def test_it_is_served_beside_the_health_of_a_scheduler_that_waits() -> None:
    client = TestClient(review_app(lambda: False, SETTINGS))
    assert client.get("/healthz").json() == {"status": "ok", "leads": False}
    assert client.post("/review", json=asked({"command": ["x"]})).json()["response"]["allowed"]


def test_a_review_that_is_too_large_or_too_deep_is_refused_unread() -> None:
    """The webhook has to answer callers that show nothing."""
    with TestClient(review_app(lambda: False, SETTINGS)) as client:
        assert client.post("/review", content=b" " * (REVIEW_BYTES + 1)).status_code == 413
        assert client.post("/review", content=b"[" * 100_000).status_code == 422
        assert client.post("/review", json=asked({"command": ["python", "x.py"]})).status_code == 200


def test_health_fails_when_the_control_loop_does_not_come_round() -> None:
    ages = [1.0, STUCK_SECONDS + 1.0]
    with TestClient(review_app(lambda: True, SETTINGS, lambda: ages[0])) as client:
        assert client.get("/healthz").json() == {"status": "ok", "leads": True}
        ages.pop(0)
        assert client.get("/healthz").status_code == 503
