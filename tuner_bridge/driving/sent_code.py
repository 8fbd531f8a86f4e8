"""SentCode: the code of a sweep's trials, brought to a scheduler whose replicas run elsewhere.

Concurrency: any thread may call.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence

from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError
from trials.spec import TrialSpec
from tuner_bridge.driving.code_on_cluster import CodeOnCluster
from tuner_bridge.driving.packing import Package

logger = logging.getLogger(__name__)


class SentCode:
    def __init__(self, code: CodeOnCluster) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._sent: set[str] = set()

    def place(self, spec: TrialSpec, client: SchedulerClient) -> TrialSpec:
        """Where the trial's replicas find their code; the scheduler has it then. May be repeated if it raises."""
        with self._lock:
            placed = self._code.place(spec)
            package = self._code.package
            if package is not None and package.digest not in self._sent:
                self._send(package, client)
                self._sent.add(package.digest)
        return placed

    def _send(self, package: Package, client: SchedulerClient) -> None:
        if not client.request("GET", f"/packages/{package.digest}")["here"]:
            print(f"elastune: the working folder goes to {client.url}: {package}", file=sys.stderr)
            client.send(f"/packages/{package.digest}", package.content)

    def send_again(self, digests: Sequence[str], client: SchedulerClient) -> None:
        """A scheduler that has moved may have lost what it was sent."""
        package = self._code.package
        for digest in digests:
            if package is None or package.digest != digest:
                # Of an earlier run of this sweep: its code is gone. Those trials end when nobody can start them.
                time.sleep(1.0)
                continue
            try:
                client.send(f"/packages/{digest}", package.content)
            except SchedulerError as error:
                logger.warning("the packed working folder was not sent again: %s", error)
                time.sleep(1.0)
