"""A training that no code of the suite runs, such as that of a command: its process ends with a status that says why.

What leaves, and what has to run again from its top, is a SystemExit with a status of its own. What comes of a lost
replica is any exception, and would look like a failure of the training.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from dist_core.errors import ControlChannelError, PeerLost
from dist_core.exit_statuses import EXIT_PEER_LOST
from dist_core.torch_private import killed_data_workers
from dist_core.trial.plain_replica import Participant

End = Callable[[int], None]


def tell_by_status(replica: Participant, *, end: End = os._exit) -> None:
    """From now on, of whatever ends this process's main thread."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if comes_of_loss(replica.present, error):
            # With what there is to be told, such as a bound of the batch that has just been learnt.
            replica.present.close()
            _end(end, EXIT_PEER_LOST)

    sys.excepthook = hook
    atexit.register(_end_as_postponed, replica, end)


def comes_of_loss(replica: Participant, error: BaseException) -> bool:
    """Whether the trial can go on from its checkpoint after this error; a batch that was too large is noted for that.

    Raises InvalidTraining where no smaller batch is allowed.
    """
    if isinstance(error, PeerLost | ControlChannelError) or replica.broken is not None or replica.was_torn(error):
        return True
    if killed_data_workers(error):
        return True
    try:
        return replica.can_run_again(error)
    except PeerLost:
        return True


def _end_as_postponed(replica: Participant, end: End) -> None:
    """By what was raised where Python would have swallowed it, while the script left its last loop."""
    try:
        replica.present.raise_postponed()
    except SystemExit as leaving:
        _end(end, leaving.code if isinstance(leaving.code, int) else 1)
    except PeerLost as error:
        sys.stderr.write(f"replica ends: {error}\n")
        _end(end, EXIT_PEER_LOST)


def _end(end: End, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    end(status)
