"""Trackers of experiments that hear of a sweep from its driver: one run a trial, however many replicas it has.

``optimize(study, objective, trackers=[MLflow(experiment="digits")])``. None of their packages is imported unless used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.trackers.base import TrackedRun, Tracker, TrialIdentity
from tuner_bridge.trackers.mlflow import MLflow
from tuner_bridge.trackers.tensorboard import TensorBoard
from tuner_bridge.trackers.weights_and_biases import WeightsAndBiases

__all__ = ["MLflow", "TensorBoard", "TrackedRun", "Tracker", "TrialIdentity", "WeightsAndBiases"]


_KINDS: dict[str, Callable[..., Tracker]] = {
    "MLflow": MLflow,
    "TensorBoard": TensorBoard,
    "WeightsAndBiases": WeightsAndBiases,
}


def trackers_named(entries: Sequence[Mapping[str, Any]]) -> list[Tracker]:
    """Return the trackers of these names; raise InvalidSweep for unknown names and arguments."""
    return [_made(entry) for entry in entries]


def _made(entry: Mapping[str, Any]) -> Tracker:
    others = entry.keys() - {"name", "classArgs"}
    if others or "name" not in entry:
        raise InvalidSweep(
            f"a tracker is {dict(entry)!r}; it must have a name, may have classArgs with its arguments, and nothing "
            "else"
        )
    make = _KINDS.get(str(entry["name"]))
    if make is None:
        raise InvalidSweep(f"a tracker's name is {entry['name']!r}; choose one of {', '.join(_KINDS)}")
    arguments = entry.get("classArgs") or {}
    try:
        return make(**arguments)
    except TypeError as error:
        said = str(error).rpartition("__init__() ")[2]
        raise InvalidSweep(f"the tracker {entry['name']} cannot be created with {arguments!r}: {said}") from error
