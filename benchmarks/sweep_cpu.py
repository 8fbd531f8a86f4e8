"""Processor time of the scheduler and of the driver in a sweep of 64 trials on 16 emulated slots.

The sweep is the default one of ``live_sweeps``, on slower devices: about five minutes long. Its replicas and their fork
servers are left out: what is measured is what tuning costs beside training. A sweep costs 6 to 7 s of the scheduler,
and 0.02 of a core as long as it lasts.
"""

from __future__ import annotations

import threading
import time

import psutil

from benchmarks.frame import Measurement
from benchmarks.live_sweeps import SLOTS, sweep

MOST_OF_A_CORE = 0.05
LOOK_SECONDS = 1.0
PROFILE = "resnet50-imagenet@0.6"
SCHEDULER = "--embedded"


class Watch:
    """Latest processor time of the scheduler that this process has started."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        own = psutil.Process()
        while not self._over.wait(LOOK_SECONDS):
            for child in own.children():
                try:
                    if SCHEDULER in " ".join(child.cmdline()):
                        used = child.cpu_times()
                        self.seconds = max(self.seconds, used.user + used.system)
                except psutil.Error:
                    continue

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def measure() -> list[Measurement]:
    watch, before, began = Watch(), time.process_time(), time.monotonic()
    ran = sweep("default", simulates=False, profile=PROFILE)
    watch.stop()
    took, driver = time.monotonic() - began, time.process_time() - before
    assert watch.seconds > 0.0, "no scheduler was seen"
    return [
        Measurement(
            what=f"processor time of the {name}, 64 trials on {SLOTS} slots",
            ours=seconds / took,
            peer=MOST_OF_A_CORE,
            unit="cores",
            peer_name="the most it may take",
            target=1.0,
            details={**ran, "seconds": seconds, "sweep_seconds": took},
        )
        for name, seconds in (("scheduler", watch.seconds), ("driver", driver))
    ]
