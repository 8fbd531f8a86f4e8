"""Replicas in pods are known by the token that the kubelet gave them, and by no other."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from scheduler.api.tokens import Access, Identity
from scheduler.kubernetes.pod_tokens import REFUSED_SECONDS, PodTokens
from tests.support.fake_cluster import FakeClusterApi
from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.client.api import Collection
from trials.kubernetes.names import Document

AUDIENCE = "elastune.default.elastune.dev"
REPLICA = "t1-abc"


def token(namespace: str = "team", pod: str = REPLICA, *, expires: float = 5000.0, signature: str = "good") -> str:
    claims = {"exp": expires, "kubernetes.io": {"namespace": namespace, "pod": {"name": pod}}}
    packed = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{packed}.{signature}"


class Reviewing(FakeClusterApi):
    """An API server that knows who signed a token, and says of it what it was given for."""

    def __init__(self) -> None:
        super().__init__()
        self.audiences = [AUDIENCE]
        self.pod, self.user = REPLICA, "system:serviceaccount:team:default"
        self.forbids = False

    def create(self, kind: Collection, namespace: str | None, document: Mapping[str, Any]) -> Document:
        self._begin("create", kind, None)
        assert (kind.plural, namespace, document["spec"]["audiences"]) == ("tokenreviews", None, [AUDIENCE])
        if self.forbids:
            raise ClusterRefused("no", status=403)
        if not document["spec"]["token"].endswith(".good"):
            return {"status": {"authenticated": False}}
        extra = {"authentication.kubernetes.io/pod-name": [self.pod]}
        user = {"username": self.user, "extra": extra}
        return {"status": {"authenticated": True, "audiences": self.audiences, "user": user}}


class Given:
    def __init__(self) -> None:
        self.api = Reviewing()
        self.now = 1000.0
        namespaces = {REPLICA: "team"}
        self.tokens = PodTokens(self.api, AUDIENCE, namespaces.get, clock=lambda: self.now)


@pytest.fixture
def given() -> Given:
    return Given()


def test_the_kubelets_token_opens_its_own_replica_and_is_asked_about_once(given: Given) -> None:
    assert given.tokens.known(token(), REPLICA) is None
    for _ in range(3):
        assert given.tokens.ask(token(), REPLICA) == Identity(Access.REPLICA, REPLICA)
    assert given.tokens.known(token(), REPLICA) == Identity(Access.REPLICA, REPLICA)
    assert given.tokens.known(token(), "t2-def") is None
    assert len(given.api.calls) == 1


def test_it_is_good_for_as_long_as_it_says(given: Given) -> None:
    given.tokens.ask(token(), REPLICA)
    given.now = 5001.0
    assert given.tokens.known(token(), REPLICA) is None


@pytest.mark.parametrize(
    "shown",
    [
        token(pod="t2-def"),
        token(namespace="other"),
        "no token at all",
        "a.b.c",
        f"a.{base64.urlsafe_b64encode(b'[]').decode()}.good",
        "a." + base64.urlsafe_b64encode(b'{"kubernetes.io": 3}').decode() + ".good",
        "",
    ],
)
def test_what_does_not_even_claim_to_be_its_own_is_refused_without_asking(given: Given, shown: str) -> None:
    assert given.tokens.ask(shown, REPLICA) is None
    assert given.tokens.ask(token(), "t9-unknown") is None
    assert not given.api.calls


def test_a_made_up_token_is_refused_and_not_asked_about_again_for_a_while(given: Given) -> None:
    made_up = token(signature="bad")
    assert given.tokens.ask(made_up, REPLICA) is None
    assert given.tokens.ask(made_up, REPLICA) is None
    assert len(given.api.calls) == 1
    given.now += REFUSED_SECONDS + 1.0
    assert given.tokens.ask(made_up, REPLICA) is None
    assert len(given.api.calls) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("audiences", ["another"]), ("pod", "t2-def"), ("user", "system:serviceaccount:other:default"), ("user", "admin")],
)
def test_the_api_servers_word_counts_and_not_the_tokens(given: Given, name: str, value: Any) -> None:
    setattr(given.api, name, value)
    assert given.tokens.ask(token(), REPLICA) is None


def test_nobody_is_refused_because_the_api_server_is_away_or_forbids_reviews(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    given.api.down = True
    for _ in range(3):
        with pytest.raises(ClusterUnreachable):
            given.tokens.ask(token(), REPLICA)
    assert len(caplog.records) == 1
    given.api.down = False
    given.api.forbids = True
    with pytest.raises(ClusterRefused, match="ClusterRole"):
        given.tokens.ask(token(), REPLICA)
    given.api.forbids = False
    assert given.tokens.ask(token(), REPLICA) is not None
