"""The examples run as their first lines say."""

from __future__ import annotations

import os
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
