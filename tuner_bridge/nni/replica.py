"""Entries of a replica that runs an NNI trial: a Python script in the replica itself, or any other command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dist_core.hooks import listen_to_metrics
from dist_core.link.environment import ReplicaEnvironment
from dist_core.trial.plain_replica import Participant
from tuner_bridge.in_replica.commands import run_process
from tuner_bridge.in_replica.run import run_replica, tell_value
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.nni.evaluations import Evaluations

_CHANNEL_MODULE = "tuner_bridge.nni.channel"
CHANNEL = f"import://{_CHANNEL_MODULE}.ElasticChannel"


def main() -> int:
    return run_replica(_prepare)


def _prepare(core: Participant, document: Mapping[str, Any]) -> Callable[[], Any]:
    assert core.environment is not None
    os.environ.update(_nni_environ(document["payload"]["nni"], core.environment))
    _take_exits_for_ends(core)
    script = Script.from_json(document["payload"]["script"])
    evaluations = Evaluations(minimises=document["payload"]["nni"]["direction"] == "minimize")
    listen_to_metrics(evaluations)

    def run() -> None:
        try:
            script.run()
            evaluations.end()
        finally:
            _flush_results()

    return run


def _flush_results() -> None:
    channel = sys.modules.get(_CHANNEL_MODULE)
    if channel is not None:
        channel.flush()


def _take_exits_for_ends(core: Participant) -> None:
    """Patch ``os._exit``, so that ``os._exit(0)`` after the final result counts as success."""
    leave, own = os._exit, os.getpid()

    def leaving(status: int) -> NoReturn:
        told = sys.modules.get(_CHANNEL_MODULE)
        if status == 0 and os.getpid() == own and told is not None:
            _flush_results()
            if told.result_is_told():
                tell_value(core, None)
                core.close()
        leave(status)

    os._exit = leaving


def run_command() -> int:
    """Entry of a replica whose trial's command is no Python script."""
    environment = ReplicaEnvironment.from_environ()
    assert environment is not None
    return run_process(
        lambda payload: (["/bin/sh", "-c", payload["command"]], _nni_environ(payload["nni"], environment))
    )


def _nni_environ(nni: Mapping[str, Any], environment: ReplicaEnvironment) -> dict[str, str]:
    """Return the variables that NNI's package looks for when it is imported in a trial."""
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
