"""A part of the contract suite with the oldest Optuna that is supported, put in front of the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
OLDEST = "4.0.0"
CONTRACT = Path(__file__).with_name("test_optuna_contract.py")
PART = "storages or TestElastic or constraints or terminator or artifacts or several_objectives or TPE or Hyperband"
"""Where releases of Optuna differ: storages, attributes, what samplers and pruners are asked; one of each kind."""


def test_the_oldest_optuna_keeps_the_contract_too(tmp_path: Path) -> None:
    """The contract's tests once more, in a process of their own."""
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), f"optuna=={OLDEST}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    which = subprocess.run(
        [sys.executable, "-c", "import optuna; print(optuna.__version__)"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert which.stdout.strip() == OLDEST
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", PART, str(CONTRACT)],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
