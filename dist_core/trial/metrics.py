"""Metrics from a trainer to whoever searches: a trainer calls callbacks of its own, and knows nothing of trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Listener = Callable[[Mapping[str, float], int, str | None], None]
"""Is given the metrics by name, the step, which means the same in all trials, and the metric that the user chose."""

_listener: Listener | None = None


def listen_to_metrics(listener: Listener | None) -> None:
    """Listen to metrics, on every replica at the same places; ``listener`` may raise what ends the trial."""
    global _listener
    _listener = listener


def tell_metrics(metrics: Mapping[str, float], *, step: int, chosen: str | None = None) -> None:
    """Tell metrics that are the same on all replicas; collective."""
    if _listener is not None:
        _listener(metrics, step, chosen)
