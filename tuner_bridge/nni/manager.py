"""NNI's manager as its driver sees it: the parent process, and what that has started beside the driver.

A manager that is killed leaves its tuner behind, which goes on holding the connection that the tuner of a resumed
experiment needs. The driver outlives the manager by a moment, and ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os

import psutil

TUNERS = ("-m nni", "--exp_params")
"""Words of the command that starts tuner and assessor."""
LEAVING_SECONDS = 3.0

logger = logging.getLogger(__name__)


class Manager:
    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._children: set[psutil.Process] = set()

    def note_children(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._children.update(self._process.children(recursive=True))

    def end_orphans(self) -> None:
        """Only if the manager is gone: one that stops in order ends its own processes."""
        with contextlib.suppress(psutil.TimeoutExpired):
            # Its connections close a moment before it is gone.
            self._process.wait(timeout=0.5)
        if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            return
        orphans = [child for child in self._children if child.pid != os.getpid() and _is_tuner(child)]
        for orphan in orphans:
            logger.warning("the manager was killed: its tuner is ended pid=%d", orphan.pid)
            with contextlib.suppress(psutil.Error):
                orphan.terminate()
        for orphan in psutil.wait_procs(orphans, timeout=LEAVING_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                orphan.kill()


def _is_tuner(process: psutil.Process) -> bool:
    try:
        # A shell may have started it, with all words in one.
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(each in words for each in TUNERS)
