"""Several teams and their rights of way: namespaces, priorities, code on a volume, and nodes that are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.rig import (
    CODE,
    NAMESPACE,
    TEAM,
    Installed,
    apply,
    delete,
    gpu_nodes,
    is_running,
    kubectl,
    log_of,
    objects,
    replicas_of,
    running,
    steady,
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
    return objects(kind, namespace=TEAM)


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


HOSTILE = """
import json, os, pathlib, urllib.error, urllib.request
own = pathlib.Path(os.environ["ELASTUNE_CHECKPOINT_DIR"])
own.mkdir(parents=True, exist_ok=True)
(own / "mine").write_text("mine")
link = own / "link"
link.unlink(missing_ok=True)
link.symlink_to("/var/run/secrets/kubernetes.io/serviceaccount/token")
state = own.parent.parent
seen = sorted(str(path.relative_to(state)) for path in state.rglob("*"))
account = pathlib.Path("/var/run/secrets/kubernetes.io").exists()
def status(path, replica):
    token = pathlib.Path(os.environ["ELASTUNE_REPLICA_TOKEN_FILE"]).read_text()
    headers = {"Authorization": "Bearer " + token, "X-Elastune-Replica": replica}
    request = urllib.request.Request(os.environ["ELASTUNE_API"] + path, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
mine = os.environ["ELASTUNE_REPLICA_ID"]
asked = {
    "own": status("/replica/trial", mine),
    "other": status("/replica/trial", os.environ["VICTIM"]),
    "package": status("/replica/package", os.environ["VICTIM"]),
    "all": status("/trials", mine),
}
print("LOOT " + json.dumps({"seen": seen, "account": account, "asked": asked}), flush=True)
"""


@pytest.mark.timeout(200)
def test_a_hostile_trial_finds_nothing_that_is_not_its_own(cluster: Installed) -> None:
    """It looks for others' checkpoints, code and logs, goes by another replica's name, and plants a study."""
    steady(cluster, "victim", study="treasure", maxReplicas=1)
    running("victim", 1)
    (victim,) = replicas_of("victim")
    assert "ELASTUNE_REPLICA_TOKEN" not in {each["name"] for each in victim["spec"]["containers"][0]["env"]}
    until(lambda: list((cluster.state_dir / "checkpoints" / "victim").glob("checkpoint-*")), 60.0, "it has saved")
    planted = {"spec": {"initContainers": [{"name": "planted", "image": "nowhere.invalid/x:1"}]}}
    names: tuple[tuple[str, dict[str, str]], ...] = (("treasure", {}), ("as-theirs", {"name": "treasure"}))
    for name, named in names:
        metadata = {"name": name, "namespace": TEAM}
        spec: dict[str, Any] = {**named, "template": planted, "quota": 1}
        apply({"apiVersion": "elastune.dev/v1", "kind": "Study", "metadata": metadata, "spec": spec})
    environ = {"VICTIM": victim["metadata"]["name"]}
    hostile = trial_document("hostile", command=["python", "-c", HOSTILE], env=environ, study="treasure-hunt")
    hostile["metadata"]["namespace"] = TEAM
    apply(hostile)
    until(lambda: [phase_of(trial) for trial in in_team("trials")] == ["Succeeded"], 90.0, "the hostile trial ended")
    client = cluster.client()
    words = log_of(client, f"{TEAM}.hostile")
    (loot,) = [json.loads(line[5:]) for line in words.splitlines() if line.startswith("LOOT ")]
    mine = f"checkpoints/{TEAM}.hostile"
    *of_the_trial, prepared, of_the_study = loot["seen"]
    assert of_the_trial == ["checkpoints", mine, f"{mine}/link", f"{mine}/mine"]
    assert (prepared, of_the_study.rpartition("-")[0]) == ("prepared", f"prepared/{TEAM}.treasure-hunt"[:49])
    assert not loot["account"]
    assert loot["asked"] == {"own": 200, "other": 403, "package": 403, "all": 401}
    # A trial that is started after the study was planted is as before it.
    steady(cluster, "later", study="treasure", maxReplicas=1)
    running("later", 1)
    (later,) = replicas_of("later")
    assert not later["spec"].get("initContainers")
    quotas = {each["name"]: each["quota"] for each in client.request("GET", "/studies")}
    assert quotas[f"{TEAM}.treasure"] == 1 and quotas.get("treasure") is None
    for name in ("checkpoints", "logs", "packages"):
        sneaking = json.dumps(trial_document("sneaking", command=["x"], template=mounting(name)))
        refused = kubectl("apply", "-f", "-", text=sneaking, check=False)
        assert "names that begin with 'elastune-' are reserved" in refused
    client.close()
    delete("victim", "later")
    kubectl("-n", TEAM, "delete", "trial", "hostile", "--timeout=60s")
    kubectl("-n", TEAM, "delete", "studies", "--all")


def mounting(part: str) -> dict[str, Any]:
    mount = {"name": "elastune-state", "mountPath": "/loot", "subPath": part}
    return {"spec": {"containers": [{"name": "replica", "volumeMounts": [mount]}]}}


def test_a_sweep_lives_in_its_teams_namespace(cluster: Installed, tmp_path: Path) -> None:
    """With the study that was there beforehand under its name."""
    metadata = {"name": "beforehand", "namespace": TEAM}
    template = {"metadata": {"labels": {"from": "beforehand"}}}
    spec = {"weight": 2, "quota": 1, "template": template}
    apply({"apiVersion": "elastune.dev/v1", "kind": "Study", "metadata": metadata, "spec": spec})
    (tmp_path / "tune.py").write_text(SWEEP)
    cluster.sweep("tune.py", folder=tmp_path, ELASTUNE_NAMESPACE=TEAM)
    client = cluster.client()
    trials = [each for each in client.request("GET", "/trials") if each["trial_id"].startswith(f"{TEAM}.beforehand-")]
    assert [each["state"] for each in trials] == ["succeeded"] * 2
    [study] = [each for each in client.request("GET", "/studies") if each["name"] == trials[0]["study"]]
    assert (study["title"], study["weight"], study["quota"]) == (f"{TEAM}.beforehand", 2, 1)
    client.close()
    assert {trial["spec"]["study"].partition("-")[0] for trial in in_team("trials")} == {"beforehand"}
    kubectl("-n", TEAM, "delete", "studies", "--all")
    kubectl("-n", TEAM, "delete", "trials", "--all", "--timeout=60s")


SWEEP = """
import optuna
import tuner_bridge

def square(trial):
    return trial.suggest_float("x", -1.0, 1.0) ** 2

if __name__ == "__main__":
    tuner_bridge.optimize(optuna.create_study(study_name="beforehand"), square, n_trials=2, n_jobs=2)
"""


@pytest.mark.skipif("ELASTUNE_TEST_IMAGE" in os.environ, reason="the code is not in that image")
def test_code_on_a_volume_is_found_where_it_is(cluster: Installed) -> None:
    environ = {"EPOCHS": "2", "STEP_SECONDS": "0"}
    command = ["python", "/home/me/project/steady.py"]
    apply(trial_document("moved", command=command, env=environ, workingDir="/home/me/project", movedTo=str(CODE)))
    until(lambda: [phase_of(each) for each in objects("trials", "moved")] == ["Succeeded"], 60.0, "it succeeded")
    kubectl("-n", NAMESPACE, "delete", "trial", "moved", "--timeout=30s")


def test_a_pod_of_higher_priority_takes_slots_and_the_trial_goes_on(cluster: Installed) -> None:
    """Pods are preempted with a grace period, and start again."""
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
        lambda: [pod for pod in objects("pods", labels=PLACEHOLDERS) if pod["status"].get("conditions")],
        60.0,
        "a placeholder waits for a node",
    )
    assert placeholder["status"]["phase"] == "Pending"
    condition = placeholder["status"]["conditions"][0]
    assert condition["reason"] == "Unschedulable"
    assert placeholder["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "4"
    kubectl("-n", NAMESPACE, "delete", "trial", "wide-trial", "--timeout=30s")
    kubectl("-n", NAMESPACE, "delete", "pods", "-l", PLACEHOLDERS, "--grace-period=0", "--force")
