"""Moments of a trial's training, kept for those who look at it later: denser while it is young.

A trial of a minute and one of a month both leave a few hundred moments, so that neither curve is coarse and neither
fills the database.
"""

from __future__ import annotations

import threading

import numpy as np

from dist_core.goodput import Hints, efficiency
from scheduler.snapshot import TrialView
from trials.record import Measurement, TrialRecord

LEAST_SECONDS = 1.0
"""Between two moments of one trial."""
MOMENTS = 200.0
"""Most moments kept before a trial's age has doubled."""


class Measuring:
    """Times at which each trial's next moment is due. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._latest: dict[str, tuple[float, int]] = {}

    def take(self, trial_id: str, now: float, size: int) -> bool:
        """Tell whether this moment is kept: enough time has passed, or the trial's size has changed."""
        with self._lock:
            began = self._began.setdefault(trial_id, now)
            at, before = self._latest.get(trial_id, (float("-inf"), size))
            due = now - at >= max(LEAST_SECONDS, (now - began) / MOMENTS) or size != before
            if due:
                self._latest[trial_id] = now, size
            return due

    def forget(self, trial_id: str) -> None:
        with self._lock:
            self._began.pop(trial_id, None)
            self._latest.pop(trial_id, None)


def measurement(trial: TrialRecord, hints: Hints, view: TrialView | None, now: float) -> Measurement:
    """Return the trial's latest measurements and the predictions for its present size."""
    assert hints.bounds is not None
    scale = hints.global_batch / hints.bounds.init_batch if hints.bounds.init_batch else 1.0
    step_seconds = noise_scale = None
    gained = 1.0
    if hints.statistics is not None:
        gained = float(efficiency(hints.statistics, scale))
        if hints.statistics.sqr > 0.0:
            noise_scale = hints.bounds.init_batch * hints.statistics.var / hints.statistics.sqr
    if hints.goodput > 0.0:
        # Goodput is examples a second times efficiency.
        step_seconds = hints.global_batch * gained / hints.goodput
    return Measurement(
        trial_id=trial.trial_id,
        at=now,
        progress=hints.progress,
        replicas=len(trial.members) // trial.slots_per_replica,
        batch=hints.global_batch,
        goodput=hints.goodput,
        predicted_goodput=_predicted(view),
        noise_scale=noise_scale,
        learning_rate=hints.learning_rate,
        step_seconds=step_seconds,
        pause_seconds=hints.last_pause_seconds,
    )


def _predicted(view: TrialView | None) -> float | None:
    if view is None or view.model is None or not view.held_slots:
        return None
    on_one_node = max(view.placement.values())
    predicted = float(view.model.curve(on_one_node, np.array([view.held_slots]))[0])
    return predicted if np.isfinite(predicted) else None
