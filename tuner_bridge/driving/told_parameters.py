"""Parameters of each trial, kept until the scheduler has them: the page and exports show them.

Concurrency: any thread may call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any


class ToldParameters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, Any]] = {}

    def note(self, trial_id: str, parameters: Mapping[str, Any]) -> None:
        with self._lock:
            self._waiting.setdefault(trial_id, {}).update({name: _plain(value) for name, value in parameters.items()})

    def waiting(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {trial_id: dict(parameters) for trial_id, parameters in self._waiting.items()}

    def are_told(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Note that the scheduler has these; what was noted meanwhile still waits."""
        with self._lock:
            for trial_id, parameters in told.items():
                waiting = self._waiting.get(trial_id, {})
                for name, value in parameters.items():
                    if name in waiting and waiting[name] == value:
                        del waiting[name]
                if not waiting:
                    self._waiting.pop(trial_id, None)


def flattened(parameters: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested choices by their path: ``{"layer": {"size": 3}}`` is ``layer.size``."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return repr(value)[:200]
