"""Objectives that train nothing: their replicas do without torch until it comes, and go on with the next trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_python

ROOT = Path(__file__).parents[2]

FRAME = """
import json, os, sys
import optuna
from tuner_bridge import optimize

def plain(trial):
    trial.set_user_attr("process", [os.getpid(), "torch" in sys.modules])
    trial.set_user_attr("open", len(os.listdir("/proc/self/fd")))
    x = trial.suggest_float("x", 0, 1)
    for step in range(3):
        trial.report(x, step)
        if trial.number == 2 and trial.should_prune():
            raise optuna.TrialPruned
    if trial.number == 3:
        raise ValueError("for once")
    return x

def draws(trial):
    import random
    import numpy
    drawn = [random.random(), float(numpy.random.rand()), list({"relu", "tanh", "gelu", "elu"})]
    trial.set_user_attr("drawn", drawn)
    return trial.suggest_float("x", 0, 1)

def imports_torch_late(trial):
    x = trial.suggest_float("x", 0, 1)
    before = "torch" in sys.modules
    trial.report(x, 0)
    import dist_core
    import torch
    import torch.distributed
    told = [before, int(os.environ["ELASTUNE_SEED"]), torch.initial_seed(), torch.distributed.get_world_size()]
    trial.set_user_attr("told", told)
    trial.report(x / 2, 1)
    return x

def trains_late(trial):
    trial.report(5.0, 0)
    import dist_core
    data = [float(i) for i in range(32)]
    loader = dist_core.AdaptiveDataLoader(data, batch_size=8)
    import torch
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model = dist_core.AdaptiveDataParallel(model, optimizer)
    for epoch in dist_core.remaining_epochs_until(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch.float().unsqueeze(1)).sum().backward()
            optimizer.step()
        trial.report(float(epoch), epoch + 1)
    return sum(p.sum().item() for p in model.parameters())

if __name__ == "__main__":
    import random, numpy
    random.seed(1)
    numpy.random.seed(1)
    pruner = optuna.pruners.ThresholdPruner(upper=-1)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
    optimize(study, globals()[sys.argv[1]], slots=1, catch=(ValueError,), **json.loads(sys.argv[2]))
    for trial in study.trials:
        shown = {"state": trial.state.name, "reports": trial.intermediate_values, **trial.user_attrs}
        print(json.dumps(shown))
"""


def sweep(folder: Path, objective: str, **options: Any) -> list[dict[str, Any]]:
    """What each trial of a sweep was, whose script has not imported torch."""
    (folder / "script.py").write_text(FRAME)
    done = run_python(folder, "script.py", objective, json.dumps(options))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_process_serves_trial_after_trial_without_torch_until_one_fails(tmp_path: Path) -> None:
    trials = sweep(tmp_path, "plain", n_trials=7)
    assert [trial["state"] for trial in trials] == ["COMPLETE"] * 2 + ["PRUNED", "FAIL"] + ["COMPLETE"] * 3
    assert all(len(trial["reports"]) == 3 for trial in trials if trial["state"] == "COMPLETE")
    pids = [trial["process"][0] for trial in trials]
    assert not any(trial["process"][1] for trial in trials), "torch was imported"
    # The first one is forked before the objective's module is in memory, and the next one from where it is.
    assert len(set(pids[1:4])) == 1 and len(set(pids[4:])) == 1
    assert pids[3] != pids[4]
    # Nothing of a trial stays open in the next one.
    assert trials[3]["open"] == trials[2]["open"] == trials[1]["open"]


def test_each_trial_has_a_process_of_its_own_where_that_is_asked_for(tmp_path: Path) -> None:
    trials = sweep(tmp_path, "plain", n_trials=3, fresh_processes=True)
    assert len({trial["process"][0] for trial in trials}) == 3


@pytest.mark.slow
def test_random_numbers_and_hashes_follow_from_the_scripts_seed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first, again = (sweep(tmp_path / name, "draws", n_trials=2) for name in ("one", "two"))
    assert [trial["drawn"] for trial in first] == [trial["drawn"] for trial in again]
    assert first[0]["drawn"][:2] != first[1]["drawn"][:2]
    assert first[0]["drawn"][2] == first[1]["drawn"][2]


def test_torch_that_comes_late_finds_its_seed_and_its_world_and_is_there_from_the_next_trial_on(tmp_path: Path) -> None:
    trials = sweep(tmp_path, "imports_torch_late", n_trials=3)
    assert [trial["told"][0] for trial in trials] == [False, True, True]
    for trial in trials:
        _, given, seed, size = trial["told"]
        assert (seed, size) == (given, 1)
        assert len(trial["reports"]) == 2


@pytest.mark.slow
def test_training_that_begins_late_is_training(tmp_path: Path) -> None:
    (trial,) = sweep(tmp_path, "trains_late", n_trials=1)
    assert trial["state"] == "COMPLETE"
    assert trial["reports"] == {"0": 5.0, "1": 0.0, "2": 1.0}
