"""A replica of a trial: run what it has to run, and tell the scheduler how that ended."""

from __future__ import annotations

import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from dist_core.errors import EXIT_PEER_LOST, ControlChannelError, PeerLost, ReplicaExit
from dist_core.link.client import ControlChannel
from dist_core.present import present_replica
from dist_core.state.seeds import seed_all, trial_seed
from dist_core.trial.plain_replica import Participant, run_training
from trials.inside.keeping import keep_process
from tuner_bridge.errors import InvalidValue
from tuner_bridge.in_replica.wire import NOT_A_NUMBER, encode_exception, encode_result, encode_value, is_nan

_told: WeakSet[ControlChannel] = WeakSet()

Prepare = Callable[[Participant, Mapping[str, Any]], Callable[[], Any]]
"""Function from the replica and its trial's description to the code that gives the trial's value."""


def run_replica(prepare: Prepare, pruned: tuple[type[BaseException], ...] = ()) -> int:
    """Exit status of the replica. ``pruned``: what the tuner's early stop is raised as."""
    replica = present_replica()
    membership = replica.membership
    assert membership is not None and replica.environment is not None
    signal.signal(signal.SIGTERM, lambda *_: membership.told_to_end())
    seed_all(trial_seed(replica.environment.trial_id, replica.environment.seed))
    try:
        return run_in(replica, prepare, pruned)
    finally:
        replica.close()


LEAVING = {
    "left": "its trial trains on without it, or is about to end",
    "paused": "its trial pauses",
    "preempted": "it was told to end; its trial goes on without it, or from its checkpoint",
}
"""Sentences that a replica prints when it leaves, by the reason."""


def run_in(replica: Participant, prepare: Prepare, pruned: tuple[type[BaseException], ...]) -> int:
    """Run a trial in a replica of the caller's, who hears signals and closes it."""
    assert replica.channel is not None
    try:
        return _run(replica, replica.channel.request("GET", "/trial"), prepare, pruned)
    except ReplicaExit as leaving:
        print(f"replica leaves: {LEAVING.get(leaving.reason, leaving.reason)}", file=sys.stderr)
        return leaving.status
    except (PeerLost, ControlChannelError) as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST


def _run(
    replica: Participant, trial: Mapping[str, Any], prepare: Prepare, pruned: tuple[type[BaseException], ...]
) -> int:
    try:
        code = prepare(replica, trial)
    except Exception as error:
        return _failed(replica, error)
    try:
        value = run_training(replica, code)
    except pruned as early:
        _tell(replica, kind="pruned", message=str(early))
        _offer_process(trial)
        return 0
    except (PeerLost, ControlChannelError, ReplicaExit):
        raise
    except (Exception, SystemExit) as error:
        present = replica.present
        if present.broken is not None:
            raise PeerLost(f"another replica vanished: {present.broken}") from error
        if present.was_torn(error):
            raise PeerLost(f"another process of this replica vanished: {error}") from error
        killed = _killed_data_workers(error)
        if killed:
            raise PeerLost(
                f"a worker process of the data loader (pid {killed[0]}) was killed, perhaps because memory ran out: "
                f"this replica ends and is replaced. Python's error: {error}"
            ) from error
        if present.is_outside:
            # The trial trains on without this joiner; its log tells why it did not come.
            traceback.print_exc()
            return 1
        return _failed(replica, error)
    present = replica.present
    if present.reports and not (present.is_outside):
        try:
            with naming_what_is_not_taken("what the objective returned"):
                tell_value(replica, value)
        except InvalidValue as error:
            return _failed(replica, error)
        _offer_process(trial)
    return 0


def _offer_process(trial: Mapping[str, Any]) -> None:
    if trial["payload"].get("keeps_process", False):
        keep_process()


def _killed_data_workers(error: BaseException) -> list[int]:
    """Only torch's data loaders have such workers."""
    if "torch" not in sys.modules:
        return []
    from dist_core.torch_private import killed_data_workers

    return killed_data_workers(error)


def tell_value(replica: Participant, value: Any) -> None:
    """Tell that the trial is over, with this value; once, for a process may end while it is being told."""
    assert replica.channel is not None
    if replica.channel in _told:
        return
    _told.add(replica.channel)
    if is_nan(value):
        _tell(replica, kind="error", error_type=NOT_A_NUMBER, message=f"the objective returned {value}")
    else:
        _tell(replica, kind="value", value=encode_result(value))


def _failed(replica: Participant, error: BaseException) -> int:
    words = traceback.format_exc()
    print(words, file=sys.stderr)
    _tell(
        replica,
        kind="error",
        value=encode_exception(error),
        error_type=type(error).__name__,
        message=str(error)[:2000],
        traceback=words[-8000:],
    )
    return 1


def _tell(replica: Participant, **outcome: Any) -> None:
    """Tell the outcome, trying for a minute: the scheduler may be being restarted."""
    assert replica.channel is not None
    replica.channel.request("POST", "/outcome", outcome, give_up_after=60.0)


@contextmanager
def naming_what_is_not_taken(what: str) -> Iterator[None]:
    """Raise InvalidValue within the block if the scheduler understands a request and refuses what is in it.

    Else the replica would take the scheduler for lost, and be started again to be refused again.
    """
    try:
        yield
    except ControlChannelError as error:
        if error.status not in (413, 422):
            raise
        raise InvalidValue(f"{what} was not accepted: {error}") from error


def ask_driver(
    replica: Participant,
    question_id: str,
    method: str,
    arguments: Mapping[str, Any],
    *,
    reports: Sequence[Mapping[str, Any]] = (),
    look_up: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Return the driver's encoded answer, waited for as long as this replica is wanted.

    ``reports``: for the scheduler, which notes them in passing: step, value and progress. ``look_up``: called now and
    then in place of looking whether to leave, for other threads.
    """
    assert replica.channel is not None
    body = {
        "id": question_id,
        "method": method,
        "arguments": {name: encode_value(value) for name, value in arguments.items()},
        "reports": [{**each, "value": each["value"] if math.isfinite(each["value"]) else None} for each in reports],
    }
    while True:
        with naming_what_is_not_taken(method):
            answer: dict[str, Any] | None = replica.channel.request("POST", "/call", body)["answer"]
        if answer is not None:
            return answer
        (look_up or replica.present.leave_if_asked)()
