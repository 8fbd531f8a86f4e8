"""Replicas as pods, against an API server in memory and watches that tell what the test says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_objects import node, quota, request
from tests.support.fake_cluster import FakeClusterApi
from trials.errors import ClusterRefused, LaunchFailed
from trials.kubernetes.client.api import PODS
from trials.kubernetes.pods import launcher as module
from trials.kubernetes.pods.launcher import TOLD_SECONDS, KubernetesLauncher
from trials.kubernetes.settings import ClusterSettings, Owner
from trials.record import ReplicaRecord

CREATED = 1767225600.0


class View:
    """The watches: they know what they were told."""

    def __init__(self, api: FakeClusterApi) -> None:
        self._api = api
        self.version = 0
        self.known: list[dict[str, Any]] = []
        self.machines = [node("n1"), node("n2")]
        self.limits: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines

    def pods(self) -> list[dict[str, Any]]:
        return self.known

    def quotas(self) -> list[dict[str, Any]]:
        return self.limits

    def catch_up(self) -> None:
        self.version += 1
        self.known = [document for (plural, _, _), document in self._api.objects.items() if plural == "pods"]


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.api = FakeClusterApi()
        self.view = View(self.api)
        self.now = CREATED
        self.launcher = KubernetesLauncher(
            self.api,
            self.view,
            ClusterSettings(image="i:1", **settings),
            owner_of=lambda trial: Owner(trial, trial, "default", "u", "s"),
            log_of=self.log_of,
            clock=lambda: self.now,
        )

    def log_of(self, namespace: str, name: str, most_bytes: int) -> str:
        return f"{namespace}/{name} says hello"

    def launch(self, replica_id: str = "t-0-abcd1234", **fields: Any) -> ReplicaRecord:
        wanted = request(replica_id=replica_id, **fields)
        process = self.launcher.launch(wanted)
        return ReplicaRecord(
            replica_id=replica_id,
            trial_id="t-0",
            node=wanted.node,
            slot=wanted.slot,
            launch_index=0,
            pid=process.pid,
            process_started=process.started,
        )

    def pod(self, replica_id: str = "t-0-abcd1234") -> dict[str, Any] | None:
        return self.api.objects.get(("pods", "default", replica_id))

    def set_status(self, status: dict[str, Any]) -> None:
        self.api.patch(PODS, "default", "t-0-abcd1234", {"status": status}, "status")
        self.view.catch_up()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_launching_again_finds_the_pod_that_is_there(rig: Rig) -> None:
    first = rig.launch()
    assert rig.launch() == first
    assert len([key for key in rig.api.objects if key[0] == "pods"]) == 1


def test_a_pod_that_the_watch_has_not_told_of_yet_is_no_loss(rig: Rig) -> None:
    replica = rig.launch()
    assert rig.launcher.exits([replica]) == []
    rig.view.catch_up()
    assert rig.launcher.exits([replica]) == []
    rig.api.delete(PODS, "default", replica.replica_id)
    rig.view.catch_up()
    assert [(gone.replica_id, gone.status) for gone in rig.launcher.exits([replica])] == [(replica.replica_id, None)]


def test_an_end_is_told_and_the_pod_goes_once_it_was_noted(rig: Rig) -> None:
    replica = rig.launch()
    ended = {"name": "replica", "state": {"terminated": {"exitCode": 75}}}
    rig.set_status({"phase": "Failed", "containerStatuses": [ended]})
    assert [gone.status for gone in rig.launcher.exits([replica])] == [75]
    assert rig.pod() is not None
    rig.launcher.exits([])
    assert rig.pod() is None


def test_a_pod_that_nobody_knows_is_deleted_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.launch()
    rig.view.catch_up()
    rig.launcher.exits([])
    assert rig.pod() is not None
    monkeypatch.setattr(module, "ORPHAN_SECONDS", 0.0)
    rig.launcher.exits([])
    assert rig.pod() is None


def test_somebody_elses_pods_are_left_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORPHAN_SECONDS", 0.0)
    rig.launch()
    rig.api.patch(PODS, "default", "t-0-abcd1234", {"metadata": {"labels": {"elastune.dev/scheduler": "other"}}})
    rig.view.catch_up()
    rig.launcher.exits([])
    assert rig.pod() is not None


def test_on_a_lost_node_replicas_are_lost(rig: Rig) -> None:
    replica = rig.launch()
    rig.set_status({"phase": "Running"})
    assert rig.launcher.exits([replica]) == []
    rig.view.machines = [node("n1", ready=False), node("n2")]
    (gone,) = rig.launcher.exits([replica])
    assert (gone.status, gone.code) == (None, "node_lost")


def test_one_that_never_starts_is_given_up(rig: Rig) -> None:
    replica = rig.launch()
    waiting = {"name": "replica", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    rig.set_status({"phase": "Pending", "containerStatuses": [waiting]})
    assert rig.launcher.exits([replica]) == []
    rig.now += 61.0
    (gone,) = rig.launcher.exits([replica])
    assert gone.code == "cannot_start"
    assert "no such image" in gone.why


def test_what_the_cluster_refuses_is_told_to_people(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ClusterRefused("exceeded quota: gpus", status=403)

    monkeypatch.setattr(rig.api, "create", refuse)
    with pytest.raises(LaunchFailed, match="exceeded quota"):
        rig.launch()


def test_a_quota_that_the_watches_have_not_told_of_is_asked_for_when_a_pod_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = quota({"requests.nvidia.com/gpu": "0"}, {}, "default")
    rig.api.objects["resourcequotas", "default", "limits"] = full
    assert rig.launcher.quotas("t-0") == ()

    def refuse(*_: Any) -> None:
        raise ClusterRefused("exceeded quota: limits", status=403)

    monkeypatch.setattr(rig.api, "create", refuse)
    with pytest.raises(LaunchFailed):
        rig.launch()
    assert [each.slots for each in rig.launcher.quotas("t-0")] == [0]
    # What the watches bring later counts, where it is later.
    full["metadata"]["resourceVersion"] = "7"
    with pytest.raises(LaunchFailed):
        rig.launch()
    wider = quota({"requests.nvidia.com/gpu": "2"}, {}, "default")
    rig.view.limits = [{**wider, "metadata": {**wider["metadata"], "resourceVersion": "8"}}]
    rig.view.catch_up()
    assert [each.slots for each in rig.launcher.quotas("t-0")] == [2]
    rig.view.limits = [{**wider, "metadata": {**wider["metadata"], "resourceVersion": "6"}}]
    rig.view.catch_up()
    assert [each.slots for each in rig.launcher.quotas("t-0")] == [0]
    rig.now += TOLD_SECONDS + 1.0
    rig.view.catch_up()
    assert [each.slots for each in rig.launcher.quotas("t-0")] == [2]


def test_the_slot_of_a_replica_that_has_ended_opens_when_its_pod_has_gone(rig: Rig) -> None:
    replica = rig.launch(slot=0)

    def open_slots() -> int:
        return sum(each.slots - len(each.in_use) for each in rig.launcher.nodes() if each.node == "n1")

    rig.view.catch_up()
    assert rig.launcher.exits([replica]) == []
    assert open_slots() == 4
    other = rig.launch("t-0-abcd9999", slot=1)
    rig.view.catch_up()
    assert open_slots() == 4
    # The scheduler has noted the end of the first; its pod is on its way out.
    rig.launcher.exits([other])
    assert open_slots() == 3
    del rig.api.objects["pods", "default", replica.replica_id]
    rig.view.catch_up()
    assert open_slots() == 4


def test_a_namespaces_quota_is_one_for_its_trials(rig: Rig) -> None:
    assert rig.launcher.quotas("t-0") == ()
    rig.view.limits = [quota({"requests.nvidia.com/gpu": "3"}, {"requests.nvidia.com/gpu": "1"}, "default")]
    rig.launch()
    rig.view.catch_up()
    (found,) = rig.launcher.quotas("t-0")
    # One is its own, two are left.
    assert found.slots == 3


def test_a_template_that_does_not_fit_into_a_slot_is_told_to_people(rig: Rig) -> None:
    large = {"spec": {"containers": [{"name": "replica", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}
    owner_of = rig.launcher._owner_of
    rig.launcher._owner_of = lambda trial_id: replace(owner_of(trial_id), templates=(large,))
    with pytest.raises(LaunchFailed, match=r"requests 8 of nvidia\.com/gpu for a replica, but a slot has 1"):
        rig.launch()
    assert rig.api.calls == []


def test_without_any_image_nothing_is_asked_of_the_cluster() -> None:
    rig = Rig()
    rig.launcher._settings = ClusterSettings()
    with pytest.raises(LaunchFailed, match="ELASTUNE_IMAGE"):
        rig.launch()
    assert rig.api.calls == []


def test_a_slot_in_use_is_ours_at_once(rig: Rig) -> None:
    rig.launch(slot=2)
    (first, _) = rig.launcher.nodes()
    assert (first.slots, first.in_use) == (4, frozenset())


def test_stopping_asks_first_and_insists_then(rig: Rig) -> None:
    replica = rig.launch()
    deleted: list[int | None] = []
    rig.api.delete = lambda kind, namespace, name, *, grace_seconds=None: deleted.append(grace_seconds)  # type: ignore[method-assign]  # a spy
    rig.launcher.stop(replica, force=False)
    rig.launcher.stop(replica, force=True)
    assert deleted[0] is None
    rig.view.catch_up()
    rig.launcher.stop(replica, force=True)
    assert deleted[-1] == 1
    rig.view.machines = [node("n1", ready=False), node("n2")]
    rig.launcher.stop(replica, force=True)
    assert deleted[-1] == 0


def test_what_a_replica_printed_is_brought_into_its_file(rig: Rig, tmp_path: Path) -> None:
    replica = rig.launch()
    rig.launcher.collect_log(replica, tmp_path / "logs" / "r.log")
    assert (tmp_path / "logs" / "r.log").read_text() == "default/t-0-abcd1234 says hello"
