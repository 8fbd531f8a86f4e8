"""Something that is done again and again in the background of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(
    action: Callable[[], None], seconds: float, *, name: str, patience: float | None = None
) -> Iterator[None]:
    """Call ``action`` every so many seconds from a thread of that name, and once more when the block has ended.

    ``patience``: seconds to wait then for a call that is under way; None: as long as it takes.
    """
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            action()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patience)
        action()
