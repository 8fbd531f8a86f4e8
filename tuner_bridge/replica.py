"""A replica of a trial: run what it has to run, and tell the scheduler how that ended."""

from __future__ import annotations

import math
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from dist_core.core import TrainingCore, get_core
from dist_core.env import EXIT_PEER_LOST
from dist_core.errors import ControlChannelError, PeerLost, ReplicaExit
from dist_core.random_streams import derived_seed, seed_all
from dist_core.rerun import run_training
from dist_core.torch_private import killed_data_workers
from tuner_bridge.wire import NOT_A_NUMBER, encode_result, encode_value, is_nan
from tuner_bridge.wired_errors import encode_exception

_told: WeakSet[TrainingCore] = WeakSet()

Prepare = Callable[[TrainingCore, Mapping[str, Any]], Callable[[], Any]]
"""From the core and what the scheduler says of the trial to the code that gives the trial's value."""


def run_replica(prepare: Prepare, pruned: tuple[type[BaseException], ...] = ()) -> int:
    """Exit status of the replica. ``pruned``: what the tuner's early stop is raised as."""
    core = get_core()
    membership = core.membership
    assert membership is not None
    signal.signal(signal.SIGTERM, lambda *_: membership.told_to_end())
    _seed_as_the_trial(core)
    try:
        return run_in(core, prepare, pruned)
    finally:
        core.close()


def _seed_as_the_trial(core: TrainingCore) -> None:
    """Code that seeds nothing splits its data alike on all replicas, and again alike when the trial goes on later.

    Else samples that one of them validates on would be another's to train on. Trials differ all the same.
    """
    assert core.environment is not None
    seed_all(derived_seed("trial", core.environment.trial_id))


def run_in(core: TrainingCore, prepare: Prepare, pruned: tuple[type[BaseException], ...]) -> int:
    """The same with a core that belongs to the caller, who hears signals and closes it."""
    assert core.channel is not None
    try:
        return _run(core, core.channel.request("GET", "/trial"), prepare, pruned)
    except ReplicaExit as leaving:
        print(f"replica leaves: {leaving.reason}", file=sys.stderr)
        return int(leaving.code or 0)
    except (PeerLost, ControlChannelError) as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST


def _run(
    core: TrainingCore, trial: Mapping[str, Any], prepare: Prepare, pruned: tuple[type[BaseException], ...]
) -> int:
    try:
        code = prepare(core, trial)
    except Exception as error:
        return _failed(core, error)
    try:
        value = run_training(core, code)
    except pruned as early:
        _tell(core, kind="pruned", message=str(early))
        return 0
    except (PeerLost, ControlChannelError, ReplicaExit):
        raise
    except (Exception, SystemExit) as error:
        if core.broken is not None:
            raise PeerLost(f"another replica vanished: {core.broken}") from error
        killed = killed_data_workers(error)
        if killed:
            raise PeerLost(
                f"a worker process of the data loader (pid {killed[0]}) was killed, perhaps for want of memory: this "
                f"replica ends and is replaced. What Python said: {error}"
            ) from error
        if core.joining and not core.joined:
            # The trial trains on without this joiner; its log tells why it did not come.
            traceback.print_exc()
            return 1
        return _failed(core, error)
    if core.reports and not (core.joining and not core.joined):
        tell_value(core, value)
    return 0


def tell_value(core: TrainingCore, value: Any) -> None:
    """The trial is over, with this value; once, for a process may end while it is being told."""
    if core in _told:
        return
    _told.add(core)
    if is_nan(value):
        _tell(core, kind="error", error_type=NOT_A_NUMBER, message=f"the objective returned {value}")
    else:
        _tell(core, kind="value", value=encode_result(value))


def _failed(core: TrainingCore, error: BaseException) -> int:
    words = traceback.format_exc()
    print(words, file=sys.stderr)
    _tell(
        core,
        kind="error",
        value=encode_exception(error),
        error_type=type(error).__name__,
        message=str(error)[:2000],
        traceback=words[-8000:],
    )
    return 1


def _tell(core: TrainingCore, **outcome: Any) -> None:
    """The outcome outlives a scheduler that is being restarted: keep trying for as long as the lease lasts."""
    assert core.channel is not None
    core.channel.request("POST", "/outcome", outcome, give_up_after=60.0)


def ask_driver(
    core: TrainingCore,
    question_id: str,
    method: str,
    arguments: Mapping[str, Any],
    *,
    reports: Sequence[Mapping[str, Any]] = (),
    look_up: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """The driver's encoded answer, waited for as long as this replica is wanted.

    ``reports``: for the scheduler, which notes them in passing: step, value and progress. ``look_up``: called now and
    then in place of looking whether to leave, for other threads.
    """
    assert core.channel is not None
    body = {
        "id": question_id,
        "method": method,
        "arguments": {name: encode_value(value) for name, value in arguments.items()},
        "reports": [{**each, "value": each["value"] if math.isfinite(each["value"]) else None} for each in reports],
    }
    while True:
        answer: dict[str, Any] | None = core.channel.request("POST", "/call", body)["answer"]
        if answer is not None:
            return answer
        (look_up or core.leave_if_asked)()
