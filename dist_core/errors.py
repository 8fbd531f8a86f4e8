"""Errors inside a replica, split by what the caller does next.

DistCoreError
├── InvalidTraining        the user's script or arguments are wrong: fix the input
│   └── NothingLeftToTrain a trial begins where it would end: give it more epochs
├── InvalidCheckpoint      a checkpoint folder that cannot be read: choose another, or start afresh
├── ControlChannelError    the scheduler refused or cannot be reached: retry, then leave
└── PeerLost               another replica of this generation is gone: the trial is rebuilt without it

ReplicaExit, RunAgain and JoinAgain are no errors: they unwind the user's code in a replica that has to leave, or whose
code has to run again. They derive from SystemExit so that ``except Exception`` in a training script does not swallow
them, and so that a process of which the suite runs no more than the training ends with a status that says which it was.
"""

from __future__ import annotations

UNDIVIDED = "in one pass: leave out gradient_accumulation, and raise the upper bound of local_bsz_bounds to batch_size"
"""Ends the sentence "Train each batch ..." for code that several passes of a step do not suit."""


class DistCoreError(Exception):
    """Base of everything that dist_core raises on purpose."""


class InvalidTraining(DistCoreError, ValueError):
    """The training script asks for something contradictory; the message says what to change."""


class BatchLeftOut(InvalidTraining):
    """One replica leaves out a batch that others train on, where that cannot be followed; ``why`` says where."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"one replica skips a batch that others train on. This is not supported {why}. Decide whether to skip a "
            "batch from values that all replicas share, such as a sum from an Accumulator"
        )


class NothingLeftToTrain(InvalidTraining):
    """The parent whose state a trial begins with has trained as many epochs as the trial asks for."""


class InvalidCheckpoint(DistCoreError):
    """A checkpoint is missing a file, or its content does not match its checksum."""


class ControlChannelError(DistCoreError):
    """A request to the scheduler failed for good; ``status`` is the HTTP status, or None."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PeerLost(DistCoreError):
    """A collective failed because another replica died or left without agreement."""


class Unwinding(SystemExit):
    """Base of the exceptions by which Elastune ends the user's code: the replica leaves, or its code runs again."""


class ReplicaExit(Unwinding):
    """This replica leaves; ``reason`` is ``left``, ``paused`` or ``preempted``.

    ``status``: of a replica that the suite runs. A process where nobody catches it says that it has left.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(status or EXIT_LEFT)
        self.reason = reason
        self.status = status


class RunAgain(Unwinding):
    """The user's code runs again from its top, and goes on where the trial stands. Raised where all survivors are.

    ``in_loop``: within the training loop that it has left, of which a part was not trained. Where nobody catches it the
    state in memory ends with the process, and the trial goes on from its checkpoint.
    """

    def __init__(self, *, in_loop: bool = False) -> None:
        super().__init__(EXIT_PEER_LOST)
        self.in_loop = in_loop


class JoinAgain(Unwinding):
    """The survivors passed the epoch this joiner had aimed at: run the user's code again from its top."""

    def __init__(self) -> None:
        super().__init__(EXIT_JOIN_AGAIN)


EXIT_PREEMPTED = 143
"""It saved its state and left because it was told to (128 + SIGTERM)."""

EXIT_PEER_LOST = 75
"""It stopped because another one vanished (EX_TEMPFAIL): not the user's failure."""

EXIT_LEFT = 77
"""Exit status of a command within a replica that left its trial, which trains on without it or is paused."""

EXIT_JOIN_AGAIN = 76
"""Exit status of a command within a replica whose training came too late to join and is to run again."""
