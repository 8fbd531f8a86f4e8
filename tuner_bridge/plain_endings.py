"""Mistakes in a sweep's call end a script in one sentence: where the call is, and what to change.

Python prints the way to an exception through every library that it passed. For an exception that this suite raises on
purpose the user's own line and the message say it all; an objective's exceptions are printed as ever. A debugger,
a notebook and ELASTUNE_TRACEBACK=1 see everything.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from scheduler.errors import SchedulerError
from trials.errors import TrialsError
from trials.plain_words import printable
from tuner_bridge.errors import BridgeError, RemoteTrialError, TrialLost

OURS = (BridgeError, SchedulerError, TrialsError)
FROM_TRIALS = (RemoteTrialError, TrialLost)
"""Exceptions raised by a trial's own code; their notes hold its traceback."""
PACKAGES = tuple(
    f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("dist_core", "trials", "scheduler", "tuner_bridge")
)
STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
INTERRUPTED = "elastune:interrupted"
"""A note of a KeyboardInterrupt about which all has been said."""
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def end_plainly() -> None:
    """Print uncaught exceptions of the main thread plainly from now on. May be called often."""
    if not isinstance(sys.excepthook, _PlainEnding) and not os.environ.get("ELASTUNE_TRACEBACK"):
        sys.excepthook = _PlainEnding(sys.excepthook)


class _PlainEnding:
    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = ending_of(error, trace)
        if words is None:
            self._before(kind, error, trace)
        elif words:
            sys.stderr.write(f"{words}\n")


def ending_of(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return what to print for the error; None: everything, as Python does; empty: nothing more."""
    if isinstance(error, KeyboardInterrupt):
        return "" if INTERRUPTED in getattr(error, "__notes__", ()) else None
    if not isinstance(error, OURS) or isinstance(error, FROM_TRIALS):
        return None
    own = [frame for frame in traceback.extract_tb(trace) if not _is_a_librarys(frame.filename)]
    where = f'  File "{own[-1].filename}", line {own[-1].lineno}: {own[-1].line}\n' if own else ""
    return f"{where}elastune: {printable(str(error))}"


def _is_a_librarys(path: str) -> bool:
    return path.startswith((*PACKAGES, STANDARD, "<")) or f"{os.sep}site-packages{os.sep}" in path
