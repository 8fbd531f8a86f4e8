"""A replica whose code has not come to train, and may never: what it needs of its trial, without importing torch.

Most of what people tune trains with torch, but not all of it; and a process is up in a tenth of the time without. When
torch comes, the training core takes this one's place, with its line to the scheduler and what has been registered.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from dist_core.errors import EXIT_PREEMPTED, ReplicaExit, Unwinding
from dist_core.generations.membership import Membership
from dist_core.hooks import when_imported
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from dist_core.link.hints_sender import HintsSender
from dist_core.state.states import StateRegistry

if TYPE_CHECKING:
    from dist_core.trial.replica import Replica


logger = logging.getLogger(__name__)

UNWATCHED_SECONDS = 0.3
"""Code that is over by then has needed nobody who watches for what happens to its trial."""
Participant: TypeAlias = "PlainReplica | Replica"
"""The process in which an objective runs, as its trial sees it."""


class PlainReplica:
    joined = is_outside = passes_do_not_count = False
    stands_alone = True
    broken: str | None = None
    progress = 0.0

    def __init__(self, environment: ReplicaEnvironment) -> None:
        self.environment: ReplicaEnvironment | None = environment
        self.registry = StateRegistry()
        self._line = ControlChannel(environment)
        self.channel: ControlChannel | None = self._line
        self.hints = HintsSender(self._line)
        self._members = Membership(self._line, environment)
        self.membership: Membership | None = self._members
        self._members.on_grace_over = self._say_what_is_lost
        self._members.start(after=UNWATCHED_SECONDS)
        self._reports = environment.launch_index == 0
        self.successor: Participant | None = None

    @property
    def present(self) -> Participant:
        return self if self.successor is None else self.successor

    @property
    def reports(self) -> bool:
        return self._reports

    def together(self, action: Callable[[Any], Any], *, otherwise: Callable[[], Any] | None = None) -> NoReturn:
        raise AssertionError("a replica that stands alone does nothing together with others")

    def explain(self, error: BaseException) -> None:
        """Add nothing: what the code computes does not depend on the trial's replicas."""

    def raise_postponed(self) -> None:
        """Do nothing: errors are postponed in training only."""

    def warn(self, message: str) -> None:
        logger.warning(message)
        self.hints.warn(message)

    def leave_if_asked(self) -> None:
        """Raise ReplicaExit if asked to leave; there is no state to save."""
        pending = self._members.pending()
        if self._members.must_leave is not None:
            self.hints.flush()
            raise ReplicaExit("preempted", EXIT_PREEMPTED)
        if pending is not None and not pending.generation.members:
            raise ReplicaExit("paused", 0)

    def can_run_again(self, error: BaseException) -> bool:
        return False

    def free_device_memory(self) -> None:
        """Do nothing: no device memory is in use."""

    def was_torn(self, error: BaseException) -> bool:
        return False

    def _say_what_is_lost(self, message: str) -> None:
        self.hints.warn(message)
        self.hints.flush()

    def close(self) -> None:
        if self.successor is not None:
            self.successor.close()
            return
        self.hints.close()
        self._members.stop()
        self._line.close()
        if not self._members.is_watching:
            self._line.let_go_if_closed()
        end()


_begun: PlainReplica | None = None


def begun() -> PlainReplica | None:
    """Return this process's replica if it has begun without torch."""
    return _begun


def begin(environment: ReplicaEnvironment, on_torch: Callable[[], None]) -> PlainReplica:
    """Begin as this process's participant. ``on_torch`` is called as soon as torch has been imported."""
    global _begun
    when_imported("torch", on_torch)
    _begun = PlainReplica(environment)
    return _begun


def end() -> None:
    """End the replica; its process may become another one."""
    global _begun
    _begun = None


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
                replica.present.explain(error)
                raise
        except Exception as error:
            replica.present.explain(error)
            raise
        # The failed run's tensors go before the next one allocates its own.
        gc.collect()
        os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
        replica.present.free_device_memory()
