"""The gallery's examples for Kubernetes, applied and started as their first lines say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.cluster.rig import NAMESPACE, Installed, kubectl, status, until
from tests.support.project import ROOT

EXAMPLES = ROOT / "examples" / "kubernetes"


@pytest.mark.timeout(300)
def test_a_trial_by_hand_grows_and_trains_each_epoch_once(cluster: Installed) -> None:
    """Its epochs are shorter than the start of a replica, which may come too late and comes again then."""
    kubectl("-n", NAMESPACE, "apply", "-f", str(EXAMPLES / "trial.yaml"))
    until(lambda: status("moons-by-hand").get("phase") in ("Succeeded", "Failed"), 200.0, "it ended")
    client = cluster.client()
    logs = client.request("GET", "/trials/moons-by-hand/log")
    client.close()
    said = "\n".join(each["words"] for each in logs)
    assert status("moons-by-hand")["phase"] == "Succeeded", said
    assert sorted({int(each) for each in re.findall(r"epoch (\d+) on", said)}) == list(range(45)), said
    assert max(int(each) for each in re.findall(r"on (\d+) replicas", said)) > 1, said
    assert float(re.findall(r"accuracy ([0-9.]+)", said)[-1]) > 0.9
    kubectl("-n", NAMESPACE, "delete", "-f", str(EXAMPLES / "trial.yaml"), "--timeout=30s")


@pytest.mark.timeout(300)
def test_a_sweep_runs_from_this_machine(cluster: Installed, tmp_path: Path) -> None:
    """Pods start for each of its trials."""
    shutil.copy(EXAMPLES / "sweep.py", tmp_path)
    said = cluster.sweep("sweep.py", "3", folder=tmp_path)
    found = re.search(r"best: accuracy ([0-9.]+)", said)
    assert found is not None and float(found.group(1)) > 0.85, said
