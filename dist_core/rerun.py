"""Runs the user's training code, again from its top where that is how it goes on.

Two things end a run without ending the training: the survivors passed the epoch a joiner had aimed at, and a batch
did not fit into memory. The state of the latter is kept at its last complete step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from dist_core.errors import JoinAgain
from dist_core.plain_replica import Participant

T = TypeVar("T")


def run_training(replica: Participant, code: Callable[[], T]) -> T:
    """The result of ``code``. Raises what it raises, except for what can be gone on from."""
    while True:
        try:
            return code()
        except (JoinAgain, RuntimeError, MemoryError) as error:
            # RuntimeError is the base of torch's out-of-memory errors.
            if not replica.present.can_run_again(error):
                raise
        # The failed run's tensors go before the next one allocates its own.
        gc.collect()
        replica.present.free_device_memory()
