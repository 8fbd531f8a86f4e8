"""Front ends: tuners keep their own words, each foreign one stops in its folder here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trials.terms import StudyTerms

if TYPE_CHECKING:
    from tuner_bridge.optuna import optimize

__all__ = ["StudyTerms", "optimize"]


def __getattr__(name: str) -> Any:
    if name == "optimize":
        from tuner_bridge.optuna import optimize

        return optimize
    raise AttributeError(f"module 'tuner_bridge' has no attribute {name!r}")
