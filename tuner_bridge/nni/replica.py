"""Entries of a replica that runs an NNI trial: a Python script in the replica itself, or any other command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dist_core.hooks import listen_to_metrics
from dist_core.link.environment import ReplicaEnvironment
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import Participant
from tuner_bridge.in_replica.commands import run_process
from tuner_bridge.in_replica.evaluations import objective_in, warn_of_no_objective
from tuner_bridge.in_replica.run import run_replica, tell_value
from tuner_bridge.in_replica.scripts import Script

if TYPE_CHECKING:
    from tuner_bridge.nni.channel import ElasticChannel

_CHANNEL_MODULE = "tuner_bridge.nni.channel"
CHANNEL = f"import://{_CHANNEL_MODULE}.ElasticChannel"
STATE = "nni-evaluations"


class Evaluations:
    """Tells NNI a trainer's evaluations as the trial's results, where its code tells none itself.

    That shows at the second evaluation, before which the first one waits. What has been told is not told again after a
    restart, and a replica that joins counts as the others do. NNI's package is loaded no sooner than a trainer
    evaluates: few scripts have one. ``minimises``: of the experiment's tuner.
    """

    def __init__(self, *, minimises: bool) -> None:
        self._minimises = minimises
        self._held: float | None = None
        self._last: float | None = None
        self._told = 0
        self._has_warned = False

    def __call__(self, metrics: Mapping[str, float], step: int, chosen: str | None) -> None:
        import nni

        registry = get_core().registry
        if not registry.has(STATE):
            registry.register(STATE, self)
        if nni.get_current_parameter() is None:
            # A script that has not asked for its parameters may tell no results either.
            return
        value = objective_in(metrics, chosen, minimises=self._minimises)
        if value is None:
            if not self._has_warned:
                self._has_warned = True
                warn_of_no_objective(metrics)
            return
        if self._code_tells_results():
            self._held = self._last = None
        elif self._told == 0 and self._held is None:
            self._held = self._last = value
        else:
            self._tell_held()
            self._tell(value)

    def end(self) -> None:
        """Report the last evaluation as the final result, if the script has ended without one."""
        if self._last is None or self._code_tells_results() or _channel().finals:
            return
        import nni

        self._tell_held()
        nni.report_final_result(self._last)

    def _code_tells_results(self) -> bool:
        return _channel().counted > self._told

    def _tell_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._tell(held)

    def _tell(self, value: float) -> None:
        import nni

        channel = _channel()
        before = channel.counted
        nni.report_intermediate_result(value)
        self._told += channel.counted - before
        self._last = value

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._held, "last": self._last, "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held, self._last, self._told = state["held"], state["last"], state["told"]


def _channel() -> ElasticChannel:
    from tuner_bridge.nni.channel import present_channel

    return present_channel()


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
