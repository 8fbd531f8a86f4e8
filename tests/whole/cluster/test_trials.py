"""Single trials on a real cluster: written by hand, rescaled, driven off their nodes, refused."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from datetime import datetime
from typing import Any

import pytest

from scheduler.client import Client
from tests.support.cluster.rig import (
    NAMESPACE,
    Installed,
    apply,
    delete,
    goes_on,
    gpu_nodes,
    kubectl,
    log_of,
    node_command,
    objects,
    printed,
    replicas_of,
    running,
    schedulers,
    status,
    steady,
    stranger,
    trial_document,
    until,
)


def test_a_trial_of_a_few_lines_runs_and_kubectl_tells_about_it(cluster: Installed) -> None:
    began = time.monotonic()
    apply(trial_document("hello", command=["python", "-c", "print('hello from a pod')"]))
    pods = until(lambda: objects("pods", labels="elastune.dev/trial=hello"), 10.0, "its pod is there")
    seconds = time.monotonic() - began
    print(f"applied to pod created, by kubectl's clock: {seconds:.2f} s")
    until(lambda: status("hello").get("phase") == "Succeeded", 60.0, "it succeeded")
    assert pods[0]["metadata"]["ownerReferences"][0]["kind"] == "Trial"
    header, row = kubectl("-n", NAMESPACE, "get", "trial", "hello").splitlines()
    assert header.split() == ["NAME", "STUDY", "PHASE", "REPLICAS", "GOODPUT", "PROGRESS", "PROMISE", "REASON", "AGE"]
    assert "Succeeded" in row

    def events() -> str:
        return kubectl("-n", NAMESPACE, "describe", "trial", "hello").partition("\nEvents:")[2]

    until(
        lambda: all(each in events() for each in ("Finished", "starting: starts on 1 slot")),
        20.0,
        "its story in events",
    )
    with_client = cluster.client()
    words = log_of(with_client, "hello")
    with_client.close()
    assert "hello from a pod" in words
    kubectl("-n", NAMESPACE, "delete", "trial", "hello", "--timeout=30s")


def test_what_makes_no_sense_is_refused_at_the_door(cluster: Installed) -> None:
    document = json.dumps(trial_document("bad", command=["x"], minReplicas=4, maxReplicas=2))
    refused = kubectl("apply", "-f", "-", text=document, check=False)
    assert "spec.minReplicas is 4 but spec.maxReplicas is 2" in refused
    document = json.dumps(trial_document("bad", command=["x"], maxReplicas=0))
    assert "spec.maxReplicas" in kubectl("apply", "-f", "-", text=document, check=False)
    assert status("bad") == {}


def test_it_grows_is_drained_and_shrinks_while_survivors_train_on(cluster: Installed) -> None:
    """Pods start, and are drained with a grace period."""
    steady(cluster, "elastic", maxReplicas=1)
    running("elastic", 1)
    (first,) = replicas_of("elastic")
    name = first["metadata"]["name"]
    kubectl("-n", NAMESPACE, "scale", "trial", "elastic", "--replicas=2")
    running("elastic", 2)
    joined = until(lambda: len(printed(name)) > 3 and printed(name), 30.0, "it says how it goes")
    kubectl("-n", NAMESPACE, "scale", "trial", "elastic", "--replicas=3")
    running("elastic", 3)
    time.sleep(3.0)
    words = printed(name)
    pauses = [each["longest"] for each in words]
    print(f"longest step of the survivor around growing to 2 and 3: {max(pauses):.3f} s")
    assert [each["epoch"] for each in words] == list(range(len(words)))
    assert len({each["pid"] for each in words}) == 1
    assert len(joined) <= len(words)
    # Somebody drains one of its pods: the others train on without it.
    victim = next(pod for pod in replicas_of("elastic") if pod["metadata"]["name"] != name)
    node = victim["spec"]["nodeName"]
    kubectl("cordon", node)
    try:
        kubectl("-n", NAMESPACE, "delete", "pod", victim["metadata"]["name"], "--wait=false")
        history = until(
            lambda: [
                entry for entry in (status("elastic").get("history") or {}).values() if "replica_preempted" in entry
            ],
            30.0,
            "the trial notes that a replica was told to leave",
        )
        assert "the others go on" in history[0]
        survivors = {pod["metadata"]["name"] for pod in replicas_of("elastic")}
        assert name in survivors
        assert victim["metadata"]["name"] not in survivors
    finally:
        kubectl("uncordon", node)
    before = len(printed(name))
    until(lambda: len(printed(name)) > before, 20.0, "the survivor trains on")
    assert len({each["pid"] for each in printed(name)}) == 1
    delete("elastic")


def quota(name: str, hard: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"hard": hard, **spec},
    }


def tried(name: str, words: str) -> list[str]:
    """Entries of a trial's history."""
    return [entry for entry in (status(name).get("history") or {}).values() if words in entry]


def test_a_replica_of_two_pods_comes_and_goes_whole(cluster: Installed) -> None:
    """Two pods start three times."""
    steady(cluster, "large", how="sharded", slotsPerReplica=2, maxReplicas=1)
    try:
        running("large", 1)
        first = replicas_of("large")
        assert len(first) == 2
        assert len({pod["spec"]["nodeName"] for pod in first}) == 1
        kubectl("-n", NAMESPACE, "scale", "trial", "large", "--replicas=2")
        running("large", 2)
        by_node = Counter(pod["spec"]["nodeName"] for pod in replicas_of("large"))
        assert all(count % 2 == 0 for count in by_node.values())
        # Somebody drains one pod: its replica goes, the other one trains on, and another whole one comes.
        names = {pod["metadata"]["name"] for pod in first}
        victim = next(pod for pod in replicas_of("large") if pod["metadata"]["name"] not in names)["metadata"]["name"]
        kubectl("-n", NAMESPACE, "delete", "pod", victim, "--wait=false")
        until(lambda: tried("large", "replica_preempted"), 30.0, "the trial notes that one was told to leave")

        def is_whole_again() -> bool:
            present = {pod["metadata"]["name"] for pod in replicas_of("large")}
            return status("large").get("replicas") == 2 and len(present) == 4 and victim not in present

        until(is_whole_again, 90.0, "a whole one has come in its place")
        assert names <= {pod["metadata"]["name"] for pod in replicas_of("large")}
    finally:
        delete("large")


def test_a_trial_comes_to_another_layout_by_its_checkpoint(cluster: Installed) -> None:
    """Pods of one layout leave before those of the other start: 10 s each time."""
    apply(quota("gpus", {"requests.nvidia.com/gpu": "2"}))
    try:
        until(lambda: objects("resourcequotas", "gpus")[0].get("status", {}).get("used"), 15.0, "the quota is counted")
        steady(cluster, "wide", how="chosen", replicaSizes=[1, 2, 4], maxReplicas=1)
        running("wide", 1)
        assert status("wide")["record"]["layout"].startswith("2 sharded"), "it has no room on one pod"
        assert tried("wide", "asks for 2 sharded")
        before = {pod["metadata"]["name"] for pod in replicas_of("wide")}
        assert len(before) == 2
        until(lambda: any(printed(name) for name in before), 60.0, "it trains")
        reached = max(each["epoch"] for name in before for each in printed(name))
    finally:
        kubectl("-n", NAMESPACE, "delete", "resourcequota", "gpus")
    try:
        until(lambda: status("wide")["record"]["layout"].startswith("4 sharded"), 120.0, "it is one replica of four")
        running("wide", 1)

        def new() -> set[str]:
            return {pod["metadata"]["name"] for pod in replicas_of("wide")} - before

        until(lambda: len(new()) == 4 and any(printed(name) for name in new()), 60.0, "it trains on, on four")
        assert min(each["epoch"] for name in new() for each in printed(name)) >= reached
    finally:
        delete("wide")


def test_a_fork_begins_on_one_node_with_the_state_of_a_trial_that_trains_on_another(cluster: Installed) -> None:
    """Pods start one after another."""
    one_slot_a_node(cluster)
    steady(cluster, "origin", maxReplicas=1)
    running("origin", 1)
    (origin,) = replicas_of("origin")
    name = origin["metadata"]["name"]
    until(lambda: len(printed(name)) > 3, 60.0, "it trains")
    reached = len(printed(name))
    with Client(cluster.client()) as client:
        made = client.fork("origin")
    assert made is not None and made.parent == "origin"
    running(made.id, 1)
    (fork,) = replicas_of(made.id)
    assert fork["spec"]["nodeName"] != origin["spec"]["nodeName"]
    began = until(lambda: printed(fork["metadata"]["name"]), 60.0, "it trains on")[0]["epoch"]
    assert began >= reached
    until(lambda: len(printed(name)) > began, 30.0, "the trial whose state it has trains on")
    assert len({each["pid"] for each in printed(name)}) == 1
    delete("origin", made.id)
    drop("stranger-1")
    drop("stranger-2")


def test_what_a_namespaces_quota_leaves_is_all_that_is_given_away(cluster: Installed) -> None:
    """Two quotas come into force and go, and what they held back starts."""
    steady(cluster, "modest", maxReplicas=1)
    running("modest", 1)
    apply(quota("gpus", {"requests.nvidia.com/gpu": "1"}))
    try:
        until(lambda: objects("resourcequotas", "gpus")[0].get("status", {}).get("used"), 15.0, "the quota is counted")
        # That it is told so shows that the scheduler has heard of the quota.
        steady(cluster, "second", maxReplicas=1)
        until(lambda: "resource quota 'gpus'" in status("second").get("message", ""), 30.0, "it is told why it waits")
        kubectl("-n", NAMESPACE, "scale", "trial", "modest", "--replicas=2")
        time.sleep(3.0)
        assert status("modest")["replicas"] == 1
        assert not tried("modest", "exceeded quota")
    finally:
        kubectl("-n", NAMESPACE, "delete", "resourcequota", "gpus")
    running("modest", 2)
    running("second", 1)
    delete("second")
    delete("modest")


def test_a_pod_that_the_cluster_refuses_is_given_up_and_the_trial_goes_on(cluster: Installed) -> None:
    """Two pods start, and one is given up after a while."""
    steady(cluster, "stuck", maxReplicas=1)
    running("stuck", 1)
    # One for some kinds of pods only, of which nobody but the API server knows whom it concerns.
    pods = [pod for pod in objects("pods") if pod["status"].get("phase") in ("Pending", "Running")]
    apply(quota("lasting", {"pods": str(len(pods))}, scopes=["NotTerminating"]))
    try:
        until(lambda: objects("resourcequotas", "lasting")[0].get("status", {}).get("used"), 15.0, "it is counted")
        kubectl("-n", NAMESPACE, "scale", "trial", "stuck", "--replicas=2")
        found = until(lambda: tried("stuck", "exceeded quota"), 60.0, "the quota is noted")
        assert "a replica could not be started" in found[0]
        assert status("stuck")["replicas"] == 1
    finally:
        kubectl("-n", NAMESPACE, "delete", "resourcequota", "lasting")
    delete("stuck")


def test_an_image_that_is_not_there_fails_the_trial_with_the_reason(cluster: Installed) -> None:
    apply(trial_document("imageless", command=["python", "-c", "0"], image="nowhere.invalid/none:1", maxLosses=0))
    until(lambda: status("imageless").get("phase") == "Failed", 60.0, "it failed")
    message = status("imageless")["message"]
    assert "nowhere.invalid/none:1" in message or "ErrImageNeverPull" in message, message
    delete("imageless")


def test_a_module_that_the_image_lacks_is_named(cluster: Installed) -> None:
    apply(trial_document("lost", entrypoint="not_there.at_all:main", maxLosses=0))
    until(lambda: status("lost").get("phase") == "Failed", 60.0, "it failed")
    assert "not_there" in status("lost")["message"]
    delete("lost")


def test_only_what_others_leave_is_given_away(cluster: Installed) -> None:
    node = gpu_nodes()[0]
    free = open_slots(cluster, node)
    stranger("stranger", 2, nodeName=node)
    try:
        until(lambda: open_slots(cluster, node) == free - 2, 15.0, "the stranger's slots are closed")
    finally:
        drop("stranger")
    until(lambda: open_slots(cluster, node) == free, 15.0, "they are open again")


def one_slot_a_node(cluster: Installed) -> None:
    for number, node in enumerate(gpu_nodes(), start=1):
        stranger(f"stranger-{number}", 3, nodeName=node)
    until(lambda: all(open_slots(cluster, node) == 1 for node in gpu_nodes()), 20.0, "one slot each")


def drop(name: str) -> None:
    kubectl("-n", NAMESPACE, "delete", "pod", name, "--grace-period=0", "--force", check=False)


def open_slots(cluster: Installed, node: str) -> int:
    client = cluster.client()
    try:
        return next((each["slots"] for each in client.request("GET", "/overview")["nodes"] if each["name"] == node), -1)
    finally:
        client.close()


@pytest.mark.skipif("ELASTUNE_TEST_CLUSTER" not in os.environ, reason="nobody has said how to kill a node here")
def test_when_a_node_is_lost_the_replicas_on_the_others_train_on(cluster: Installed) -> None:
    """The cluster takes 40 s to report a lost node."""
    one_slot_a_node(cluster)
    steady(cluster, "spread", minReplicas=1, maxReplicas=2)
    running("spread", 2)
    (survivor,) = [pod for pod in replicas_of("spread") if pod["spec"]["nodeName"] == "kube-node-1"]
    node_command("stop-node", "2")
    try:
        entry = until(
            lambda: [
                each
                for each in map(json.loads, (status("spread").get("history") or {}).values())
                if "replica_lost" in each
            ],
            60.0,
            "the loss is noted",
        )[0]
        reported = until(lambda: lost_at("kube-node-2"), 30.0, "the node is reported lost")
        count = len(printed(survivor["metadata"]["name"]))
        until(lambda: len(printed(survivor["metadata"]["name"])) > count, 20.0, "the survivor trains on")
        print(f"next generation {entry[0] - reported:.2f} s after the node was reported lost (whole seconds there)")
        assert len({each["pid"] for each in printed(survivor["metadata"]["name"])}) == 1
        assert entry[0] - reported < 5.0
    finally:
        node_command("start-node", "2")
        drop("stranger-1")
        drop("stranger-2")
    delete("spread")


def lost_at(node: str) -> float | None:
    """When Kubernetes has noted that the node does not answer."""
    (found,) = [each for each in objects("nodes") if each["metadata"]["name"] == node]
    (ready,) = [each for each in found["status"]["conditions"] if each["type"] == "Ready"]
    if ready["status"] == "True":
        return None
    return datetime.fromisoformat(ready["lastTransitionTime"]).timestamp()


# ------------------------------------------------------ a scheduler that stands by takes over from the one that leads


def test_the_scheduler_that_stands_by_takes_over_and_adopts_everything(cluster: Installed) -> None:
    """The lease of the one that led has to run out."""
    until(lambda: len(schedulers()) == 2, 30.0, "two schedulers run")
    steady(cluster, "watched", maxReplicas=2)
    running("watched", 2)
    replicas = {pod["metadata"]["name"] for pod in replicas_of("watched")}
    leader = cluster.leader()
    killed = time.monotonic()
    kubectl("-n", NAMESPACE, "delete", "pod", leader, "--grace-period=0", "--force", "--wait=false")
    # The one that stood by, or the one that has been made in place of the killed one: whichever looks first.
    until(lambda: (cluster.leader() or leader) != leader, 60.0, "another one leads")
    print(f"another one led {time.monotonic() - killed:.1f} s after the leader was killed")
    goes_on(replicas)
    kubectl("-n", NAMESPACE, "scale", "trial", "watched", "--replicas=1")
    running("watched", 1)
    delete("watched")
