"""Replicas that only exist: they keep in touch with the scheduler, report now and then, and sleep."""

from __future__ import annotations

import time

from dist_core.trial.current import get_core


def main() -> int:
    core = get_core()
    assert core.channel is not None
    for step in range(1_000_000):
        core.channel.request("POST", "/report", {"step": step, "value": 1.0 / (step + 1), "progress": float(step)})
        time.sleep(5.0)
    return 0
