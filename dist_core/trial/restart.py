"""Runs the user's training code, again from its top where that is how it goes on.

Three things end a run without ending the training: the survivors passed the epoch a joiner had aimed at, a batch did
not fit into memory, and a replica was lost with what it had added to an evaluation. The state of the latter two is
kept, at the last complete step or the end of the last training loop.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TypeVar

from dist_core.errors import Unwinding
from dist_core.trial.plain_replica import Participant

T = TypeVar("T")


def run_training(replica: Participant, code: Callable[[], T]) -> T:
    """Return the result of ``code``.

    Raises what it raises, except for what can be gone on from. Libraries take variables out of the environment when
    they have read them (MLflow's run of the trial): the code finds all of them each time.
    """
    environ = dict(os.environ)
    while True:
        try:
            value = code()
            replica.present.raise_postponed()
            return value
        except (Unwinding, RuntimeError, MemoryError) as error:
            # RuntimeError is the base of torch's out-of-memory errors.
            if not replica.present.can_run_again(error):
                raise
        # The failed run's tensors go before the next one allocates its own.
        gc.collect()
        os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
        replica.present.free_device_memory()
