"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT
from tests.support.scripts import run_python


@pytest.mark.slow
# ------------------------------------------------------- what importing our packages costs: torch belongs to replicas


@pytest.mark.parametrize(("trials", "how"), [(1, ["--how", "stages"]), (1, ["--how", "sharded"]), (2, [])])
def test_a_small_gpt_is_tuned_over_two_slots_a_trial(tmp_path: Path, trials: int, how: list[str]) -> None:
    """Trials of a language model."""
    script = str(ROOT / "examples" / "gpt.py")
    done = run_python(
        tmp_path, script, "--trials", str(trials), *how, environ={"GPT_EPOCHS": "1", "GPT_SAMPLES": "256"}
    )
    assert "best: " in done.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "elastune-gpt" / "logs").rglob("*.log"))
    assert ("stage 0" in logs) == ("sharded" not in how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trials", "value", "at_least", "at_most"),
    [
        ("text_classification", 1, "accuracy", 0.5, 1.0),
        ("lora", 1, "loss", 0.0, 4.1),
        # Which configuration one trial has depends on a race.
        ("tabular", 4, "accuracy", 0.9, 1.0),
        ("lightning_digits", 1, "loss", 0.0, 2.0),
    ],
)
def test_an_example_tunes_what_it_says(
    tmp_path: Path, name: str, trials: int, value: str, at_least: float, at_most: float
) -> None:
    """Untrained models have losses of log(64), or 4.16, and of log(10), or 2.3; most of the table are of one kind."""
    done = run_python(
        tmp_path, str(ROOT / "examples" / f"{name}.py"), "--trials", str(trials), environ={"TMPDIR": str(tmp_path)}
    )
    found = re.search(rf"best: {value} ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    assert at_least < float(found.group(1)) <= at_most


@pytest.mark.parametrize(
    "module", ["dist_core", "dist_core.goodput", "trials.store", "scheduler.host.server", "tuner_bridge"]
)
def test_scheduler_side_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
