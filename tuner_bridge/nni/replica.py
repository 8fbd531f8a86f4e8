"""Entries of a replica that runs an NNI trial: a Python script in the replica itself, or any other command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dist_core.channel import ControlChannel
from dist_core.core import TrainingCore
from dist_core.env import EXIT_PEER_LOST, EXIT_PREEMPTED, ReplicaEnvironment
from dist_core.errors import ControlChannelError
from tuner_bridge.replica import run_replica
from tuner_bridge.script import Script

CHANNEL = "import://tuner_bridge.nni.channel.ElasticChannel"


def main() -> int:
    return run_replica(_prepare)


def _prepare(core: TrainingCore, document: Mapping[str, Any]) -> Callable[[], Any]:
    assert core.environment is not None
    os.environ.update(_nni_environ(document["payload"]["nni"], core.environment))
    return Script.from_json(document["payload"]["script"]).run


def run_command() -> int:
    """Run the command in a shell and tell how it ended. The command itself calls the scheduler, if it uses NNI."""
    environment = ReplicaEnvironment.from_environ()
    assert environment is not None
    channel = ControlChannel(environment)
    try:
        payload = channel.request("GET", "/trial")["payload"]
        process = subprocess.Popen(
            ["/bin/sh", "-c", payload["command"]],
            env={**os.environ, **_nni_environ(payload["nni"], environment)},
        )
        # The shell passes no signal on; the replica's processes are a session of their own.
        signal.signal(signal.SIGTERM, lambda *_: _tell_all(process.pid))
        status = process.wait()
        if status in (EXIT_PREEMPTED, EXIT_PEER_LOST) or status < 0:
            return status if status > 0 else 128 - status
        if status == 0:
            outcome: dict[str, Any] = {"kind": "value", "value": None}
        else:
            message = f"the trial command ended with status {status}"
            outcome = {"kind": "error", "error_type": "CommandFailed", "message": message}
        channel.request("POST", "/outcome", outcome, give_up_after=60.0)
        return min(status, 1)
    except ControlChannelError as error:
        print(f"replica ends: {error}", file=sys.stderr)
        return EXIT_PEER_LOST
    finally:
        channel.close()


def _tell_all(child: int) -> None:
    """Ask every process of this session but this one to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgid(child), signal.SIGTERM)


def _nni_environ(nni: Mapping[str, Any], environment: ReplicaEnvironment) -> dict[str, str]:
    """What NNI's package looks for when it is imported in a trial."""
    folder = Path(nni["folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        # Another machine than the one that the experiment runs on.
        folder = environment.checkpoint_dir / "nni"
        folder.mkdir(parents=True, exist_ok=True)
    return {
        "NNI_PLATFORM": "tuner_bridge",
        "NNI_EXP_ID": nni["experiment"],
        "NNI_TRIAL_JOB_ID": nni["trial"],
        "NNI_TRIAL_SEQ_ID": str(nni["sequence"]),
        "NNI_SYS_DIR": str(folder),
        "NNI_OUTPUT_DIR": str(folder),
        "NNI_TRIAL_COMMAND_CHANNEL": CHANNEL,
    }
