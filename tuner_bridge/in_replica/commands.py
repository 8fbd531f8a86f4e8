"""A command as what a trial runs: a Python script in the replica itself, anything else as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dist_core.errors import EXIT_JOIN_AGAIN, EXIT_LEFT, EXIT_PEER_LOST, EXIT_PREEMPTED, ControlChannelError
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ATTEMPTS, ReplicaEnvironment
from dist_core.trial.plain_replica import Participant
from trials.inside.user_code import moved_path
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.run import run_replica
from tuner_bridge.in_replica.scripts import is_another_python, script, starts_python

KILLED = 128 + signal.SIGKILL
"""As shells say it."""

Payload = Mapping[str, Any]


def run() -> int:
    """Entry of the replicas of a trial that names a command."""
    environment = ReplicaEnvironment.from_environ()
    assert environment is not None
    channel = ControlChannel(environment)
    try:
        command = channel.request("GET", "/trial")["payload"]["command"]
    except ControlChannelError as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST
    finally:
        channel.close()
    if _is_python(_here(command)):
        return run_replica(_prepare)
    return run_process(lambda payload: (_here(payload["command"]), {}))


def _here(command: Sequence[str]) -> list[str]:
    """Replace paths of a folder that is found elsewhere on this machine."""
    return [moved_path(word) for word in command]


def _is_python(command: Sequence[str]) -> bool:
    """Tell whether it is a script, a module or code; Python's other options need a process."""
    if not starts_python(command[0]) or is_another_python(command[0]):
        return False
    try:
        script(command)
    except InvalidSweep:
        return False
    return True


def _prepare(replica: Participant, document: Payload) -> Callable[[], Any]:
    return script(_here(document["payload"]["command"])).run


def run_process(of_payload: Callable[[Payload], tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run a command and tell how it ended; the command itself calls the scheduler, if it uses the suite.

    ``of_payload``: from the trial's payload to the command and the variables that it finds.
    """
    environment = ReplicaEnvironment.from_environ()
    assert environment is not None
    channel = ControlChannel(environment)
    try:
        words, variables = of_payload(channel.request("GET", "/trial")["payload"])
        status = _run_until_joined(channel, words, {**os.environ, **variables})
        if status == EXIT_LEFT:
            return 0
        if status in (EXIT_PREEMPTED, EXIT_PEER_LOST, KILLED) or status < 0:
            return status if status > 0 else 128 - status
        if status == 0:
            outcome: dict[str, Any] = {"kind": "value", "value": None, "of_command": True}
        else:
            message = f"the trial command ended with status {status}"
            outcome = {"kind": "error", "error_type": "CommandFailed", "message": message, "of_command": True}
        channel.request("POST", "/outcome", outcome, give_up_after=60.0)
        return min(status, 1)
    except OSError as error:
        message = f"the trial command cannot be run: {error}"
        outcome = {"kind": "error", "error_type": type(error).__name__, "message": message, "of_command": True}
        channel.request("POST", "/outcome", outcome, give_up_after=60.0)
        return 1
    except ControlChannelError as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST
    finally:
        channel.close()


def _run_until_joined(channel: ControlChannel, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit status of the command, which runs again where it came too late to join its trial."""
    was_told_to_leave = False

    def pass_on(*_: Any) -> None:
        # A shell passes no signal on; the replica's processes are a session of their own.
        nonlocal was_told_to_leave
        was_told_to_leave = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpgrp(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    attempts = 0
    while True:
        process = subprocess.Popen(words, env={**environ, ATTEMPTS: str(attempts)})
        if was_told_to_leave:
            # It may have begun after the signal, which it would ignore as this process does; it has nothing to save.
            process.kill()
        status = process.wait()
        if was_told_to_leave:
            # However it took that: it was interrupted, and goes on elsewhere.
            return EXIT_PREEMPTED
        # A command that has no training may end with that status as well.
        if status != EXIT_JOIN_AGAIN or not channel.request("GET", "/trial")["generation"]:
            return status
        attempts += 1
