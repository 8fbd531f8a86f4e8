"""Finish-time fairness: how long a job would have taken alone on an equal share (Themis, NSDI'20, section 3)."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from scheduler.simulator.application import Application, Shape

EPOCHS_SAMPLED = 6
BATCHES_SAMPLED = 8
MOST_REPLICAS = 64
"""Further replicas were not measured."""


class AliveJobs:
    """Number of jobs over time."""

    def __init__(self) -> None:
        self._times = [0.0]
        self._sums = [0.0]

    def add(self, now: float, count: int) -> None:
        """Note that there were ``count`` jobs since the last time."""
        self._sums.append(self._sums[-1] + count * (now - self._times[-1]))
        self._times.append(now)

    def mean(self, since: float, until: float) -> float:
        first = max(0, bisect_left(self._times, since) - 1)
        last = min(bisect_left(self._times, until), len(self._times) - 1)
        if last <= first:
            return 1.0
        return (self._sums[last] - self._sums[first]) / (self._times[last] - self._times[first])


def isolated_seconds(application: Application, share: float, node_slots: int) -> float:
    """Return a job's seconds on so many slots for itself, with the best batch size throughout.

    Goodput is worked out at some epochs and batch sizes, and between whole numbers of slots.
    """
    share = min(share, float(MOST_REPLICAS))
    low = max(1, min(int(share), MOST_REPLICAS - 1))
    seconds = [_seconds(application, slots, node_slots) for slots in (low, low + 1)]
    if share <= 1.0:
        return seconds[0] / max(share, 1e-6)
    part = share - low
    return 1.0 / ((1.0 - part) / seconds[0] + part / seconds[1])


def _seconds(application: Application, slots: int, node_slots: int) -> float:
    bounds, ends = application.bounds, application.epoch_ends
    slots = min(slots, max(1, bounds.max_batch // bounds.min_atomic)) if application.fixed_batch is None else 1
    whole, rest = divmod(slots, node_slots)
    shape: Shape = (node_slots,) * whole + ((rest,) if rest else ())
    epochs = np.unique(np.linspace(0, len(ends) - 2, EPOCHS_SAMPLED).astype(int))
    slowness = [1.0 / _best_goodput(application, shape, int(epoch)) for epoch in epochs]
    return float((np.diff(ends) * np.interp(np.arange(len(ends) - 1), epochs, slowness)).sum())


def _best_goodput(application: Application, shape: Shape, epoch: int) -> float:
    """Return the goodput in steps at the initial batch size a second."""
    bounds, replicas = application.bounds, sum(shape)
    if application.fixed_batch is not None:
        batches = [float(application.fixed_batch)]
    else:
        least = max(bounds.init_batch, bounds.min_atomic * replicas)
        batches = np.geomspace(least, max(least, bounds.max_batch), BATCHES_SAMPLED).tolist()
    speeds = []
    for batch in batches:
        local = batch / replicas
        accumulation = max(0, int(np.ceil(local / bounds.largest_atomic - 1e-8)) - 1)
        step, sync = application.step_seconds(shape, max(1, int(local / (accumulation + 1))))
        statistics = application.statistics(batch, epoch)
        scale = batch / bounds.init_batch
        worth = (statistics.var + statistics.sqr) / (statistics.var / scale + statistics.sqr)
        speeds.append(worth / (step + accumulation * (step - sync)))
    return max(speeds)
