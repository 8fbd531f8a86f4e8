"""A trainer's evaluations, told to NNI as the trial's results where its code tells none itself.

That shows at the second evaluation, before which the first one waits. The state is the trial's: what has been told is
not told again after a restart, and a replica that joins counts as the others do. NNI's package is loaded no sooner than
a trainer evaluates: few scripts have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_core.trial.current import get_core
from tuner_bridge.in_replica.evaluations import objective_in, warn_of_no_objective

if TYPE_CHECKING:
    from tuner_bridge.nni.channel import ElasticChannel

STATE = "nni-evaluations"


class Evaluations:
    """Is told each evaluation's metrics. ``minimises``: of the experiment's tuner."""

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
