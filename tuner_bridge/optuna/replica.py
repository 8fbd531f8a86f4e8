"""Entry of a replica that runs an Optuna objective: find the function, call it, tell the scheduler how it ended."""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Any

import optuna

from dist_core.core import TrainingCore, get_core
from dist_core.env import EXIT_PEER_LOST
from dist_core.errors import ControlChannelError, PeerLost, ReplicaExit
from dist_core.rerun import run_training
from tuner_bridge.optuna.trial import ElasticTrial
from tuner_bridge.shipping import ShippedFunction, receive
from tuner_bridge.wire import encode_exception, encode_value


def main() -> int:
    core = get_core()
    membership = core.membership
    assert core.channel is not None and membership is not None
    signal.signal(signal.SIGTERM, lambda *_: membership.ask_to_leave("preempted"))
    try:
        return _run(core, core.channel.request("GET", "/trial"))
    except ReplicaExit as leaving:
        print(f"replica leaves: {leaving.reason}", file=sys.stderr)
        return int(leaving.code or 0)
    except (PeerLost, ControlChannelError) as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST
    finally:
        core.close()


def _run(core: TrainingCore, own: dict[str, Any]) -> int:
    """Call the objective and tell how it ended."""
    try:
        objective = receive(ShippedFunction.from_json(own["payload"]["objective"]))
    except Exception as error:
        return _failed(core, error)
    try:
        value = run_training(core, lambda: objective(ElasticTrial(core, own["number"])))
    except optuna.TrialPruned as pruned:
        _tell(core, kind="pruned", message=str(pruned))
        return 0
    except (PeerLost, ControlChannelError, ReplicaExit):
        raise
    except (Exception, SystemExit) as error:
        if core.broken is not None:
            raise PeerLost(f"another replica vanished: {core.broken}") from error
        if core.joining and not core.joined:
            # The trial trains on without this joiner; its log tells why it did not come.
            traceback.print_exc()
            return 1
        return _failed(core, error)
    if core.reports and not (core.joining and not core.joined):
        _tell(core, kind="value", value=encode_value(value))
    return 0


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
