"""Which parameters mattered: asked of whoever has brought a way to tell, such as the front end that has Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

GROUP = "elastune.importance"
"""Of entry points: called with parameters and values of the trials that ended, and the direction."""
FEWEST = 8
"""Trials; from fewer nothing can be said."""


def importance_of(ended: Sequence[tuple[Mapping[str, Any], float]], direction: str) -> dict[str, Any]:
    """``{"importance": {name: part of 1}}``, or ``{"why": sentence}`` where there is none."""
    if len(ended) < FEWEST:
        return {"why": f"{len(ended)} trials have a value; from {FEWEST} on it can be told which parameters mattered"}
    found = entry_points(group=GROUP)
    if not found:
        return {"why": "Optuna, which works it out, is not installed where the scheduler runs"}
    try:
        importance = next(iter(found)).load()(ended, direction)
    except ImportError as error:
        return {"why": f"Optuna, which works it out, cannot be imported where the scheduler runs: {error}"}
    except ValueError as error:
        return {"why": f"it cannot be told: {error}"}
    return {"importance": importance}
