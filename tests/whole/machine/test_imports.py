"""What importing our packages costs: torch belongs to replicas."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["dist_core", "dist_core.goodput", "trials.store", "scheduler.host.server", "tuner_bridge"]
)
def test_scheduler_side_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
