"""The lease as one process sees it, against an election's library that is real and a server that is not."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from kubernetes.leaderelection.leaderelectionrecord import LeaderElectionRecord
from urllib3.exceptions import HTTPError

from scheduler.kubernetes.leadership import RENEW_SECONDS, Lease, resign
from tests.support.fake_cluster import FakeClusterApi
from trials.kubernetes.client.api import LEASES

NOW = "2026-01-01 00:00:00"


class Server:
    """What the lease's library calls."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.away = False
        self.timeouts: list[Any] = []

    def read_namespaced_lease(self, name: str, namespace: str, _request_timeout: Any = None) -> Any:
        self.timeouts.append(_request_timeout)
        if self.away:
            raise HTTPError("nobody answers")
        if self.holder is None:
            raise ApiException(status=404)

        class Spec:
            holder_identity = self.holder
            lease_duration_seconds = 15
            acquire_time = renew_time = None

        class Found:
            spec = Spec()

        return Found()

    def create_namespaced_lease(self, namespace: str, body: Any, _request_timeout: Any = None) -> Any:
        if self.away:
            raise HTTPError("nobody answers")
        self.holder = body.spec.holder_identity
        return body

    def replace_namespaced_lease(self, name: str, namespace: str, body: Any, _request_timeout: Any = None) -> None:
        if self.away:
            raise HTTPError("nobody answers")
        self.holder = body.spec.holder_identity


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = Server()
        self.now = 100.0
        self.others: list[str] = []
        monkeypatch.setattr("scheduler.kubernetes.leadership.client.CoordinationV1Api", lambda *_: self.server)

        class Api:
            client = None

        api: Any = Api()
        self.lease = Lease(api, "lab", "elastune", "me", led_by_other=self.others.append, monotonic=lambda: self.now)

    def renew(self) -> bool:
        record = LeaderElectionRecord("me", "15", NOW, NOW)
        if self.server.holder is None:
            return bool(self.lease.create("elastune", "lab", record))
        self.lease.get("elastune", "lab")
        return bool(self.lease.update("elastune", "lab", record))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_who_has_not_renewed_for_a_while_may_not_act(rig: Rig) -> None:
    assert not rig.lease.is_fresh()
    assert rig.renew()
    assert rig.lease.is_fresh()
    rig.server.away = True
    rig.now += RENEW_SECONDS - 0.1
    assert rig.lease.is_fresh()
    assert not rig.lease.update("elastune", "lab", LeaderElectionRecord("me", "15", NOW, NOW))
    rig.now += 0.2
    assert not rig.lease.is_fresh()
    rig.server.away = False
    assert rig.renew()
    assert rig.lease.is_fresh()


def test_one_that_led_hears_when_another_one_does(rig: Rig) -> None:
    rig.server.holder = "other"
    rig.lease.get("elastune", "lab")
    assert rig.others == []
    rig.server.holder = None
    rig.renew()
    rig.server.holder = "other"
    rig.lease.get("elastune", "lab")
    assert rig.others == ["other"]


def test_every_call_has_a_time_limit_and_a_silent_server_is_no_error(rig: Rig) -> None:
    rig.server.away = True
    found, _ = rig.lease.get("elastune", "lab")
    assert not found
    assert all(timeout is not None for timeout in rig.server.timeouts)


def test_what_was_given_up_is_not_renewed(rig: Rig) -> None:
    rig.renew()
    rig.lease.give_up()
    assert not rig.renew()


def test_who_resigns_gives_back_only_what_is_its_own() -> None:
    api = FakeClusterApi()
    api.create(LEASES, "lab", {"metadata": {"name": "elastune"}, "spec": {"holderIdentity": "other"}})
    resign(api, "lab", "elastune", "me")  # type: ignore[arg-type]  # the part of it that is used
    assert api.get(LEASES, "lab", "elastune")["spec"]["holderIdentity"] == "other"
    resign(api, "lab", "elastune", "other")  # type: ignore[arg-type]  # the part of it that is used
    assert "holderIdentity" not in api.get(LEASES, "lab", "elastune")["spec"]
