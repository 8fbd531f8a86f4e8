"""SummedResults: what training steps log, of all samples and not of one replica's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist_core.lightning.package import _ResultCollection
from dist_core.training.accumulator import Accumulator
from dist_core.trial.core import TrainingCore


class SummedResults(_ResultCollection):
    """Lightning's collection for training. ``logs_step``: whether the values of the step that runs will be logged.

    Means and sums add up over replicas; a minimum, a maximum and torchmetrics' own objects are left to who logs them.
    """

    def __init__(self, core: TrainingCore, *, counts: Callable[[], bool], logs_step: Callable[[], bool]) -> None:
        super().__init__(training=True)
        self._core = core
        self._counts = counts
        self._logs_step = logs_step
        self._of_epoch = Accumulator()
        self._of_step = Accumulator()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        super().update_metrics(key, value, batch_size)
        meta = self[key].meta
        if not (self[key].is_tensor and (meta.is_mean_reduction or meta.is_sum_reduction) and self._counts()):
            return
        weight = batch_size if meta.is_mean_reduction else 1
        if meta.on_epoch:
            self._add(self._of_epoch, key, float(value), weight)
        if meta.on_step and self._logs_step():
            self._add(self._of_step, key, float(value), weight)

    @staticmethod
    def _add(sums: Accumulator, key: str, value: float, weight: int) -> None:
        sums[f"{key} value"] += value * weight
        sums[f"{key} weight"] += weight

    def share_step(self) -> None:
        """Collective: the values that this step logs become those of all replicas."""
        for key, value, weight in self._taken(self._of_step):
            metric = self[key]
            mean = value / weight if metric.meta.is_mean_reduction else value
            metric._forward_cache = torch.as_tensor(mean, dtype=metric.value.dtype, device=metric.value.device)
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache

    def share_epoch(self) -> None:
        """Collective: the sums over the epoch become those of all replicas, of those that have left as well."""
        for key, value, weight in self._taken(self._of_epoch):
            metric = self[key]
            metric.value = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.as_tensor(int(weight), device=metric.value.device)
            metric._computed, metric._update_count, metric.has_reset = None, max(1, metric._update_count), False

        self._share_objects()

    def _share_objects(self) -> None:
        """A metric that adds up over replicas by itself is computed by all, if any has logged it in this epoch."""
        if self._core.generation.stands_alone:
            return
        mine = [key for key, each in self.items() if not each.is_tensor and each.meta.on_epoch and not each.has_reset]
        logged = self._core.together(lambda group: group.gather_json(mine), otherwise=lambda: [mine])
        for key in {key for keys in logged for key in keys} & self.keys():
            self[key].has_reset = False

    def _taken(self, sums: Accumulator) -> list[tuple[str, float, float]]:
        with sums.synchronized() as found:
            keys = [key.removesuffix(" weight") for key in found if key.endswith(" weight")]
            taken = [(key, found[f"{key} value"], found[f"{key} weight"]) for key in keys]
            for name in list(found):
                found[name] = 0.0
        return [(key, value, weight) for key, value, weight in taken if weight and key in self]
