"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--how", "stages"], ["--how", "sharded"], []])
def test_a_small_gpt_is_tuned_over_two_slots_a_trial(tmp_path: Path, how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "gpt.py"), "--trials", "2", *how],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GPT_EPOCHS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "best: " in done.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "elastune-gpt" / "logs").rglob("*.log"))
    assert ("stage 0" in logs) == ("sharded" not in how)


@pytest.mark.slow
def test_a_text_classifier_is_tuned_by_its_trainer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "text_classification.py"), "--trials", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"best: accuracy ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    assert 0.5 < float(found.group(1)) <= 1.0
