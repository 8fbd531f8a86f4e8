"""How long a step of a test's training lasts: longer while the test waits for replicas to come or go."""

from __future__ import annotations

import os
import time
from pathlib import Path

SLOWLY = "slowly"
"""File of the trace's folder that is there meanwhile."""
SLOW_STEP_SECONDS = 0.2


def rest_of_step() -> None:
    """``STEP_SECONDS``, and more where the test waits."""
    slowly = (Path(os.environ["TRACE_DIR"]) / SLOWLY).exists()
    time.sleep(max(float(os.environ.get("STEP_SECONDS", "0")), SLOW_STEP_SECONDS if slowly else 0.0))
