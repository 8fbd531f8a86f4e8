"""Replicas that only exist: they keep in touch with the scheduler, report now and then, and sleep.

``SLEEPER_SECONDS``: between two reports. ``SLEEPER_TELLS``: ``time``, to report when it reports.
"""

from __future__ import annotations

import os
import time

from dist_core.trial.current import get_core


def main() -> int:
    core = get_core()
    assert core.channel is not None
    seconds, tells_time = float(os.environ.get("SLEEPER_SECONDS", "5")), os.environ.get("SLEEPER_TELLS") == "time"
    for step in range(1_000_000):
        value = time.time() if tells_time else 1.0 / (step + 1)
        core.channel.request("POST", "/reports", {"reports": [{"step": step, "value": value, "progress": float(step)}]})
        time.sleep(seconds)
    return 0
