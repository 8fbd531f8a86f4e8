"""Several teams and their rights of way: namespaces, priorities, code on a volume, and nodes that are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.rig import (
    CODE,
    NAMESPACE,
    TEAM,
    Installed,
    apply,
    gpu_nodes,
    is_running,
    kubectl,
    objects,
    replicas_of,
    stranger,
    trial_document,
    until,
)

PLACEHOLDERS = "elastune.dev/placeholder=true"


@pytest.fixture(scope="module", autouse=True)
def _urgent() -> Iterator[None]:
    """A class of pods that may drive others off their nodes."""
    apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
        }
    )
    yield
    kubectl("delete", "priorityclass", "urgent")


def in_team(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kubectl("-n", TEAM, "get", kind, "-o", "json"))["items"]
    return found


def phase_of(trial: dict[str, Any]) -> str:
    return str((trial.get("status") or {}).get("phase", ""))


def test_a_teams_trials_live_in_its_namespace(cluster: Installed) -> None:
    document = trial_document("theirs", command=["python", "-c", "print('hello')"])
    document["metadata"]["namespace"] = TEAM
    apply(document)
    until(lambda: [phase_of(trial) for trial in in_team("trials")] == ["Succeeded"], 60.0, "their trial succeeded")
    client = cluster.client()
    assert f"{TEAM}.theirs" in [trial["trial_id"] for trial in client.request("GET", "/trials")]
    client.close()
    kubectl("-n", TEAM, "delete", "trial", "theirs", "--timeout=30s")
    until(lambda: in_team("pods") == [], 30.0, "nothing of it is left")


@pytest.mark.skipif("ELASTUNE_TEST_IMAGE" in os.environ, reason="the code is not in that image")
def test_code_on_a_volume_is_found_where_it_is(cluster: Installed) -> None:
    environ = {"EPOCHS": "2", "STEP_SECONDS": "0"}
    command = ["python", "/home/me/project/steady.py"]
    apply(trial_document("moved", command=command, env=environ, workingDir="/home/me/project", movedTo=str(CODE)))
    until(lambda: [phase_of(each) for each in objects("trials", "moved")] == ["Succeeded"], 60.0, "it succeeded")
    kubectl("-n", NAMESPACE, "delete", "trial", "moved", "--timeout=30s")


def test_a_pod_of_higher_priority_takes_slots_and_the_trial_goes_on(cluster: Installed) -> None:
    stranger("wide", 4, nodeSelector=on(2))
    digest = cluster.code()
    command = ["python", "/code/steady.py"]
    apply(trial_document("polite", command=command, workingDir="/code", package=digest, maxReplicas=2))
    until(lambda: size("polite") == 2, 90.0, "it trains on two replicas")
    before = {pod["metadata"]["name"] for pod in replicas_of("polite")}
    stranger("urgent", 3, nodeSelector=on(1), priorityClassName="urgent")
    until(lambda: size("polite") == 1, 60.0, "it trains on one")
    after = {pod["metadata"]["name"] for pod in replicas_of("polite")}
    assert len(after & before) == 1
    (trial,) = objects("trials", "polite")
    assert any("replica_preempted" in entry for entry in trial["status"]["history"].values())
    until(lambda: is_running(objects("pods", "urgent")[0]), 30.0, "the urgent pod runs")
    for name in ("wide", "urgent"):
        kubectl("-n", NAMESPACE, "delete", "pod", name, "--grace-period=0", "--force")
    kubectl("-n", NAMESPACE, "delete", "trial", "polite", "--timeout=60s")


def on(node: int) -> dict[str, str]:
    """The first or second node with GPUs."""
    return {"kubernetes.io/hostname": gpu_nodes()[node - 1]}


def size(name: str) -> int:
    (trial,) = objects("trials", name)
    return int((trial.get("status") or {}).get("replicas", 0))


def test_a_node_is_asked_for_while_a_trial_waits_for_it(cluster: Installed) -> None:
    apply(trial_document("wide-trial", command=["python", "-c", "0"], minReplicas=9, maxReplicas=9))

    (placeholder,) = until(
        lambda: [pod for pod in objects("pods", "-l", PLACEHOLDERS) if pod["status"].get("conditions")],
        60.0,
        "a placeholder waits for a node",
    )
    assert placeholder["status"]["phase"] == "Pending"
    condition = placeholder["status"]["conditions"][0]
    assert condition["reason"] == "Unschedulable"
    assert placeholder["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "4"
    kubectl("-n", NAMESPACE, "delete", "trial", "wide-trial", "--timeout=30s")
    kubectl("-n", NAMESPACE, "delete", "pods", "-l", PLACEHOLDERS, "--grace-period=0", "--force")
