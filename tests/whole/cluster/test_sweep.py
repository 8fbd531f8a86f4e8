"""An Optuna sweep on a real cluster, whose node and whose scheduler are killed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler.dashboard.picture import draw_timeline
from tests.support.cluster.rig import (
    CODE,
    NAMESPACE,
    Installed,
    delete,
    is_ready,
    is_running,
    kubectl,
    node_command,
    objects,
    until,
)
from tests.support.nine_shapes import EXPECTED, found_in_replicas

TRIALS = 5


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    "ELASTUNE_TEST_CLUSTER" not in os.environ, reason="ELASTUNE_TEST_CLUSTER names no way to kill nodes"
)
def test_a_sweep_survives_what_clusters_do(cluster: Installed, tmp_path: Path) -> None:
    """The cluster takes 40 s to report a lost node, and as long to be told of its return."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(CODE / "sweep.py", folder / "tune.py")
    log = open(tmp_path / "sweep.log", "w")
    driver = subprocess.Popen(
        [sys.executable, "tune.py", str(TRIALS), "5"], cwd=folder, env=cluster.environ(), stdout=log, stderr=log
    )
    try:
        until(lambda: trains_on("kube-node-2"), 300.0, "a trial trains on the second node")
        lost = time.monotonic()
        node_command("stop-node", "2")
        until(lambda: not is_ready("kube-node-2"), 60.0, "the node is reported lost")
        reported = time.monotonic()
        assert driver.poll() is None, "the sweep was over before the node was lost"
        until(all_train_elsewhere, 60.0, "every trial that was there trains on the rest, or waits")
        print(f"node lost: reported after {reported - lost:.1f} s, healed {time.monotonic() - reported:.1f} s later")
        leader = cluster.leader()
        kubectl("-n", NAMESPACE, "delete", "pod", leader, "--grace-period=0", "--force")
        node_command("start-node", "2")
        until(lambda: is_ready("kube-node-2"), 60.0, "the node is back")
        assert until(cluster.leader, 60.0, "another scheduler leads") != leader
        driver.wait(timeout=300)
    finally:
        driver.kill()
        driver.wait()
        log.close()
    words = (tmp_path / "sweep.log").read_text()
    assert driver.returncode == 0, words[-3000:]
    trials = of_this_sweep()
    assert [trial["status"]["phase"] for trial in trials] == ["Succeeded"] * TRIALS, words[-3000:]
    client = cluster.client()
    timeline = client.request("GET", "/timeline")
    client.close()
    picture = draw_timeline(timeline, Path(os.environ.get("ELASTUNE_TEST_PICTURES", tmp_path)) / "cluster_slots")
    assert picture.stat().st_size > 10_000
    values = sqlite3.connect(folder / "sweep.db").execute("SELECT value FROM trial_values").fetchall()
    assert len(values) == TRIALS
    assert max(value for (value,) in values) > 0.8
    delete(*(trial["metadata"]["name"] for trial in of_this_sweep()))


@pytest.mark.timeout(600)
def test_nine_shapes_of_objectives_arrive_in_pods(cluster: Installed, tmp_path: Path) -> None:
    assert found_in_replicas(tmp_path, cluster.environ()) == EXPECTED


def of_this_sweep() -> list[dict[str, Any]]:
    return [trial for trial in objects("trials") if trial["spec"]["study"].startswith("digits")]


def replicas_on(node: str) -> list[dict[str, Any]]:
    pods = objects("pods", labels="elastune.dev/replica")
    return [pod for pod in pods if pod["spec"].get("nodeName") == node and is_running(pod)]


def members() -> dict[str, tuple[str, list[str]]]:
    """Phase and members of each trial."""
    found = {}
    for trial in objects("trials"):
        record = (trial.get("status") or {}).get("record") or {}
        found[trial["metadata"]["name"]] = (record.get("state", ""), list(record.get("members") or ()))
    return found


def trains_on(node: str) -> bool:
    there = {pod["metadata"]["name"] for pod in replicas_on(node)}
    return any(there.intersection(names) for state, names in members().values() if state in ("running", "rescaling"))


def all_train_elsewhere() -> bool:
    lost = {pod["metadata"]["name"] for pod in replicas_on("kube-node-2")}
    return not any(lost.intersection(names) for _, names in members().values())
