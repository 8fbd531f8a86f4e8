"""The sweep's study, where an objective knows it by a name of its script."""

from __future__ import annotations

import importlib
from typing import Any


class NamedStudy:
    """Study of the running trial, in a replica. In the driver, only its class is named, in what is pickled."""

    def __getattr__(self, name: str) -> Any:
        # What stands behind it is a replica's: a driver never has it in memory.
        current = importlib.import_module("tuner_bridge.optuna.current")
        return getattr(current.current_trial().study, name)
