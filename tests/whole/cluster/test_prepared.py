"""A study's data is prepared once for all nodes, on the volume that checkpoints are on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster.rig import Installed

SWEEP = """
import os, time
import numpy as np
import optuna
from dist_core import prepared
from tuner_bridge import optimize

PARTS, ROWS = 24, 240


def squares(part):
    print("makes", part.index, flush=True)
    time.sleep(0.1)
    for number in part.of(ROWS):
        yield {"number": number, "square": np.full((2, 3), number * number, dtype=np.float32)}


def objective(trial):
    scale = trial.suggest_float("scale", 1.0, 2.0)
    began = time.monotonic()
    data = prepared("squares", squares, parts=PARTS)
    print("is there", len(data), os.environ["HOSTNAME"], flush=True)
    return scale * sum(row["number"] + float(row["square"][1, 2]) for row in data)


if __name__ == "__main__":
    study = optuna.create_study(study_name="prepares", sampler=optuna.samplers.RandomSampler(seed=0))
    optimize(study, objective, n_trials=8, n_jobs=8, max_replicas=1)
    whole = sum(number + number**2 for number in range(ROWS))
    assert all(abs(each.value / (each.params["scale"] * whole) - 1.0) < 1e-9 for each in study.trials)
    print("all have seen it")
"""


@pytest.mark.timeout(300)
def test_each_part_is_made_once_on_any_node(cluster: Installed, tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(SWEEP)
    assert "all have seen it" in cluster.sweep("sweep.py", folder=tmp_path)
    client = cluster.client()
    mine = [each for each in client.request("GET", "/trials") if each["study"].startswith("prepares")]
    assert len(mine) == 8
    made: list[int] = []
    makers, nodes = set(), set()
    for each in mine:
        for log in client.request("GET", f"/trials/{each['trial_id']}/log"):
            parts = [int(part) for part in re.findall(r"makes (\d+)", log["words"])]
            made += parts
            makers |= {each["trial_id"]} if parts else set()
            assert "is there 240" in log["words"], log["words"]
        nodes |= {replica["node"] for replica in client.request("GET", f"/trials/{each['trial_id']}")["replicas"]}
    client.close()
    assert sorted(made) == list(range(24))
    assert len(makers) > 1, "several trials share the work"
    assert len(nodes) == 2
    [folder] = (cluster.state_dir / "prepared").glob("prepares-*")
    assert len(list(folder.rglob("*.arrow"))) == 24
