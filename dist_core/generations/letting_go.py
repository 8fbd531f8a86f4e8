"""Ends process groups on a thread that is none of theirs.

A Gloo group ends its threads when nobody knows of it any more, and waits for them. What is to happen when a collective
is over runs on those threads and may know of the group itself: were it the last to do so, the thread would wait for
itself, and the C++ library ends the whole process for that. So whoever leaves a group hands it over here first.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable

import torch.distributed as dist

LINGER_SECONDS = 0.5
"""A group that was left keeps its connections that long, so that closing them delays nobody's next step."""
_HERE_ALONE = 2
"""References to what is known here alone: the dictionary's, and the one of whoever asks."""

_left: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def let_go(groups: Iterable[dist.ProcessGroup]) -> None:
    """End these groups once nobody else knows of them. The same one may come more than once, from any thread."""
    global _thread
    _left.put(list(groups))
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_end_what_is_left, name="elastune-close", daemon=True)
            _thread.start()


def _end_what_is_left() -> None:
    # In this thread's own variables: the interpreter's end waits for none of these groups then.
    known: dict[int, dist.ProcessGroup] = {}
    while True:
        try:
            arrived = _left.get(timeout=LINGER_SECONDS if known else None)
        except queue.Empty:
            for key in [key for key in known if sys.getrefcount(known[key]) == _HERE_ALONE]:
                del known[key]
        else:
            known |= {id(group): group for group in arrived}
            del arrived
