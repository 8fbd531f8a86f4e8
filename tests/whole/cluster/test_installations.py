"""Installations of their own: behind an API server that is away for a while, and without Helm."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from scripts.render_manifests import rendered
from tests.support.cluster.gate import gate
from tests.support.cluster.rig import (
    NAMESPACE,
    apply,
    beside_the_nodes_to_kill,
    goes_on,
    installed,
    kubectl,
    objects,
    printed,
    replicas_of,
    running,
    schedulers,
    status,
    steady,
    trial_document,
    until,
    values,
)

OUTAGE_SECONDS = 18.0
"""Longer than a lease."""


@pytest.mark.timeout(700)
def test_the_plain_manifests_do_what_the_chart_does(tmp_path: Path) -> None:
    """The first pods of a cluster find nothing compiled or cached: they have five minutes to start."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    for name, text in rendered(values(tmp_path / "state"), NAMESPACE).items():
        (folder / name).write_text(text)
    try:
        kubectl("apply", "-k", str(folder))
        until(lambda: objects("pods", labels="elastune.dev/leader=true"), 300.0, "a scheduler leads")
        apply(trial_document("plain", command=["python", "-c", "print('hello')"]))
        until(lambda: status("plain").get("phase") == "Succeeded", 180.0, "a trial succeeded")
        kubectl("-n", NAMESPACE, "delete", "trials,studies", "--all", "--timeout=60s")
    finally:
        kubectl("delete", "-k", str(folder), "--timeout=50s")


@pytest.mark.skipif("ELASTUNE_TEST_CLUSTER" not in os.environ, reason="only pods on this machine reach the gate")
def test_while_the_api_server_does_not_answer_the_scheduler_everything_trains_on(tmp_path: Path) -> None:
    """After the other one: the bridge at which pods reach the gate is there once a pod has been."""
    server = server_as_pods_see_it()
    with gate(server[0], server) as way:
        through = [
            {"name": "KUBERNETES_SERVICE_HOST", "value": server[0]},
            {"name": "KUBERNETES_SERVICE_PORT", "value": str(way.address[1])},
        ]
        with installed(tmp_path / "state", scheduler={"extraEnv": through, **beside_the_nodes_to_kill()}) as cluster:
            steady(cluster, "patient", maxReplicas=2)
            running("patient", 2)
            replicas = {pod["metadata"]["name"] for pod in replicas_of("patient")}
            before = schedulers()
            way.close()
            time.sleep(OUTAGE_SECONDS)
            goes_on(replicas)
            way.open()
            kubectl("-n", NAMESPACE, "scale", "trial", "patient", "--replicas=1")
            running("patient", 1)
            # The same process decides again: it had not ended, and nobody had to take over.
            assert schedulers() == before
            until(lambda: len(replicas_of("patient")) == 1, 60.0, "the pod that was to leave is gone")
            (left,) = replicas_of("patient")
            words = printed(left["metadata"]["name"])
            longest = max(each["longest"] for each in words)
            print(f"longest step around {OUTAGE_SECONDS:.0f} s without an API server: {longest:.2f} s")
            assert len({each["pid"] for each in words}) == 1


def server_as_pods_see_it() -> tuple[str, int]:
    """One of the API server's own addresses, which its certificate names."""
    found = json.loads(kubectl("-n", "default", "get", "endpoints", "kubernetes", "-o", "json"))["subsets"][0]
    return found["addresses"][0]["ip"], found["ports"][0]["port"]
