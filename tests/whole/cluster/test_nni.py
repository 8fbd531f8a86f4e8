"""An NNI experiment whose trials are pods."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cluster.rig import Installed, delete, objects
from tests.support.nni_experiment import NniExperiment

pytest.importorskip("nni")

REPORTS = """
import nni
x = nni.get_next_parameter()["x"]
for step in range(3):
    nni.report_intermediate_result(x + step)
nni.report_final_result(x + 10)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif("ELASTUNE_TEST_IMAGE" in os.environ, reason="NNI is not in that image")
def test_an_experiment_reaches_the_scheduler_in_the_cluster(
    cluster: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NNI's manager takes 10 s to start, and pods as long."""
    monkeypatch.setenv("ELASTUNE_URL", cluster.url)
    monkeypatch.setenv("ELASTUNE_TOKEN", cluster.token)
    experiment = NniExperiment(tmp_path, REPORTS, {"maxTrialNumber": 2}, {})
    try:
        experiment.create()
        experiment.until(lambda: experiment.states() == ["SUCCEEDED"] * 2, "both trials succeeded", 150.0)
        for trial in experiment.trials():
            x = json.loads(trial["hyperParameters"][0])["parameters"]["x"]
            expected = [*(("PERIODICAL", step, x + step) for step in range(3)), ("FINAL", 0, x + 10)]
            assert experiment.results(trial["trialJobId"]) == expected
        mine = [trial for trial in objects("trials") if trial["spec"]["study"] == f"nni-{experiment.id}"]
        assert [trial["status"]["phase"] for trial in mine] == ["Succeeded"] * 2
        delete(*(trial["metadata"]["name"] for trial in mine))
    finally:
        experiment.close()
