"""A scheduler that stands by takes over from the one that leads."""

from __future__ import annotations

import time

from tests.support.cluster.rig import (
    NAMESPACE,
    Installed,
    delete,
    goes_on,
    kubectl,
    replicas_of,
    running,
    schedulers,
    steady,
    until,
)


def test_the_scheduler_that_stands_by_takes_over_and_adopts_everything(cluster: Installed) -> None:
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
