"""Which core is present: that of the process, or of whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dist_core.link.environment import ReplicaEnvironment
from dist_core.trial.core import TrainingCore
from dist_core.trial.own_process import tell_by_status
from dist_core.trial.plain_replica import begun, end

_present: ContextVar[TrainingCore | None] = ContextVar("elastune-trial", default=None)
_of_process: TrainingCore | None = None
"""Of code, threads the user has started among it, in whose context none is present."""


def get_core() -> TrainingCore:
    """The core that is present here, or that of this process, made on first use."""
    global _of_process
    here = _present.get()
    if here is not None:
        return here
    if _of_process is None:
        before = begun()
        environment = ReplicaEnvironment.from_environ()
        _of_process = TrainingCore(environment, before)
        if before is not None:
            before.successor = _of_process
        _of_process.offer_world()
        if environment is not None and environment.attempts is not None:
            tell_by_status(_of_process)
    return _of_process


@contextmanager
def presenting(core: TrainingCore) -> Iterator[None]:
    """Within, this is the core of whoever asks in this context: one process may hold several replicas."""
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
