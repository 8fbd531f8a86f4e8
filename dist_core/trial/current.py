"""Current core: that of the process, or of whoever asks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from dist_core.errors import EXIT_PEER_LOST, ControlChannelError, PeerLost
from dist_core.link.environment import ReplicaEnvironment
from dist_core.torch_private import killed_data_workers
from dist_core.trial.plain_replica import Participant, begun, end
from dist_core.trial.replica import Replica

_present: ContextVar[Replica | None] = ContextVar("elastune-trial", default=None)
_of_process: Replica | None = None
"""Core of the code and its threads in whose context none is current."""


def get_core() -> Replica:
    """Return the Replica of the current context, else this process's, which is made on first use."""
    global _of_process
    here = _present.get()
    if here is not None:
        return here
    if _of_process is None:
        before = begun()
        environment = ReplicaEnvironment.from_environ()
        _of_process = Replica(environment, before)
        if before is not None:
            before.successor = _of_process
        _of_process.offer_world()
        if environment is not None and environment.attempts is not None:
            tell_by_status(_of_process)
    return _of_process


@contextmanager
def presenting(core: Replica) -> Iterator[None]:
    """Make this the core of whoever asks in this context: one process may hold several replicas."""
    token = _present.set(core)
    try:
        yield
    finally:
        _present.reset(token)


def reset_core() -> None:
    """Forget the core; for a process that trains several things one after another, and for tests."""
    global _of_process
    if _of_process is not None:
        _of_process.close()
        if _of_process.world is not None:
            _of_process.world.remove()
    _of_process = None
    end()


def tell_by_status(replica: Participant) -> None:
    """Report by exit status, from now on, whatever ends this process's main thread."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if comes_of_loss(replica.present, error):
            # With what there is to be told, such as a bound of the batch that has just been learnt.
            replica.present.close()
            _end(EXIT_PEER_LOST)

    sys.excepthook = hook
    atexit.register(_end_as_postponed, replica)


def comes_of_loss(replica: Participant, error: BaseException) -> bool:
    """Tell whether the trial can go on from its checkpoint after this error; a batch that was too large is noted.

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


def _end_as_postponed(replica: Participant) -> None:
    """End with what was raised where Python would have swallowed it, while the script left its last loop."""
    try:
        replica.present.raise_postponed()
    except SystemExit as leaving:
        _end(leaving.code if isinstance(leaving.code, int) else 1)
    except PeerLost as error:
        sys.stderr.write(f"replica ends: {error}\n")
        _end(EXIT_PEER_LOST)


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
