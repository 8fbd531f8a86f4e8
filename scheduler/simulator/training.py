"""One simulated job: trains on what it is given, profiles itself and picks its batch size, as the adaptive core does.

Progress and completion follow the published simulator of Pollux's artifact: goodput holds until an epoch ends, a
change of placement costs a pause in which slots are held, and the model is refitted as configurations are added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dist_core.goodput import (
    BatchBounds,
    Configuration,
    GradientStatistics,
    Hints,
    Observation,
    ThroughputParams,
    choose_batch,
    fit_throughput,
    gain,
)
from dist_core.gradients.noise.estimator import is_measured
from dist_core.layout import Layout
from scheduler.simulator.application import Shape
from scheduler.simulator.workload import Submission

Request = Literal["elastic", "fixed_batch", "rigid"]
"""Freedom that a job's user leaves to the scheduler: size and batch size, the size, or nothing."""
REFIT_GROWTH = 1.1
_CHOICE_SECONDS = 1.0
"""Seconds between choices of the batch size within an epoch, with ``exact``; the adaptive core's longest."""
_CLOSE = 1e-6
"""Seconds before an epoch's end at which it counts as reached: sums of times are not exact."""


@functools.cache
def _measured_share(begins: int, ends: int) -> float:
    """Return the share of one replica's steps from ``begins`` to before ``ends`` that measure."""
    return sum(is_measured(step, num_replicas=1, every=None) for step in range(begins, ends)) / (ends - begins)


def shares_on(placement: Mapping[str, int], size: int) -> Shape:
    """Shares of a batch that so many slots each compute, by node; one that is larger than a node counts at its end."""
    if size == 1:
        return tuple(placement.values())
    shape, over = [], 0
    for count in placement.values():
        whole, over = divmod(count + over, size)
        if whole:
            shape.append(whole)
    return tuple(shape)


class SimulatedTraining:
    def __init__(self, submission: Submission, request: Request, *, exact: bool = False) -> None:
        """``exact``: epochs end when they end, and a size has been measured for as many steps as were made at it.

        Else, as in the published simulator, they end at whole seconds, and one step of a size is enough.
        """
        self._exact = exact
        self.submission = submission
        self.application = submission.application
        fixed = submission.batch_size if request != "elastic" else self.application.fixed_batch
        self._fixed_batch = fixed
        self.shape: Shape = ()
        self.placement: dict[str, int] = {}
        self.pause_left = 0.0
        self.progress = 0.0
        """Steps at the initial batch size."""
        self.epoch = 0
        self.finished_at: float | None = None
        self.num_rescales = -1
        self.num_undone = 0
        """Changes of size that were taken back before they had paid for their pause."""
        self.slot_seconds = 0.0
        self._atomic = self._accumulation = 0
        self._rows: dict[Configuration, Observation] = {}
        self._steps: dict[Configuration, float] = {}
        """Made at each size, with ``exact``."""
        self._chosen_at = 0.0
        self._statistics: GradientStatistics | None = None
        self._params: ThroughputParams | None = None
        self._fitted = (0, 0)
        self._measured_goodput = 0.0
        self._latest: Change | None = None
        self.layout = ""
        """Layout in which its replicas hold the model, where that is a choice."""

    @property
    def bounds(self) -> BatchBounds:
        bounds = self.submission.application.bounds
        if self._fixed_batch is None:
            return bounds
        return BatchBounds(
            init_batch=bounds.init_batch,
            max_batch=max(self._fixed_batch, bounds.init_batch),
            min_atomic=bounds.min_atomic,
            max_atomic=bounds.max_atomic,
        )

    @property
    def most_replicas(self) -> int:
        """Beyond this a replica would get less than the smallest local batch."""
        if self.application.fixed_batch is not None:
            return 1
        batch = self._fixed_batch or self.application.bounds.max_batch
        return max(1, batch // self.application.bounds.min_atomic)

    @property
    def global_batch(self) -> int:
        return sum(self.shape) * self._atomic * (self._accumulation + 1)

    # ------------------------------------------------------------------ training

    def hold(self, layout: str) -> None:
        """Hold the model in this layout from now on, as the scheduler has chosen it."""
        choices = self.submission.choices
        if choices is not None and self.layout != str(choices.named(layout)):
            self.layout, self._params = str(choices.named(layout)), None
            self.application = choices.applications[self.layout]

    def fits(self, layout: str) -> bool:
        """Tell whether replicas with that layout have room for the model."""
        choices = self.submission.choices
        return choices is None or choices.fits(choices.named(layout))

    @property
    def share_size(self) -> int:
        """Slots that compute one share of a batch together."""
        return Layout.from_name(self.layout).slots_per_share if self.layout else self.submission.share_size

    def place(self, placement: dict[str, int], pause_seconds: float, now: float) -> None:
        """Train on these slots from now on, after the pause; on none: stand still, without losing anything."""
        shape = shares_on(placement, self.share_size)
        before, after = sum(self.shape), sum(shape)
        if before != after and self.num_rescales >= 0:
            goodput = self._measured_goodput if before else 0.0
            if self._latest is not None and self._latest.is_undone_by(after, goodput, now):
                self.num_undone += 1
            self._latest = Change(now, before, after, goodput, pause_seconds)
        self.placement = dict(placement)
        self.shape = shape
        if self.shape:
            self.num_rescales += 1
            self.pause_left = pause_seconds
            self._choose_batch()

    def advance(self, now: float, seconds: float) -> None:
        """Train for ``seconds`` from ``now``; set ``finished_at`` if the last epoch ends within them."""
        if not self.shape or self.finished_at is not None:
            return
        self.slot_seconds += sum(self.placement.values()) * seconds
        pause = min(self.pause_left, seconds)
        self.pause_left -= pause
        now, seconds = now + pause, seconds - pause
        ends = self.application.epoch_ends
        while seconds > 0:
            goodput = self._goodput()
            end = float(ends[self.epoch + 1])
            if self.progress + goodput * seconds < end - (_CLOSE * goodput if self._exact else 0.0):
                self.progress += goodput * seconds
                self._count_steps(seconds)
                if not self._exact or now + seconds - self._chosen_at >= _CHOICE_SECONDS:
                    self._choose_batch()
                    self._chosen_at = now + seconds
                return
            took = (end - self.progress) / goodput
            if not self._exact:
                took = float(round(took))
            self._count_steps(took)
            self.progress = end
            now, seconds = now + took, seconds - took
            self.epoch += 1
            if self.epoch == len(ends) - 1:
                self.finished_at = now
                return
            self._choose_batch()

    @property
    def epoch_ends_in(self) -> float:
        """Seconds until then, as long as nothing changes; infinite while it stands still."""
        if not self.shape or self.finished_at is not None:
            return math.inf
        left = float(self.application.epoch_ends[self.epoch + 1]) - self.progress
        return self.pause_left + max(0.0, left) / self._goodput()

    @property
    def seconds_to_next_step(self) -> float:
        """Return the mean seconds to the next step; 0 while the job stands still."""
        if not self.shape:
            return 0.0
        return 0.5 * self.application.step_seconds(self.shape, self._atomic)[0]

    def _count_steps(self, seconds: float) -> None:
        if self._exact:
            configuration = self._configuration()
            row = self._rows[configuration]
            self._steps[configuration] = self._steps.get(configuration, 0.0) + seconds / row.optim_seconds
            self._rows[configuration] = replace(row, count=max(1, int(self._steps[configuration])))

    def _configuration(self) -> Configuration:
        return Configuration(len(self.shape), sum(self.shape), self._atomic, layout=self.layout)

    def _goodput(self) -> float:
        """Initial-batch steps a second, from what is true; notes what the job itself would measure."""
        application, batch = self.application, self.global_batch
        step, sync = application.step_seconds(self.shape, self._atomic)
        self._statistics = application.statistics(batch, self.epoch)
        configuration = self._configuration()
        if configuration not in self._rows:
            self._rows[configuration] = Observation(
                configuration, max(step - sync, 1e-9), step, 1 if self._exact else 50
            )
        worth = float(gain(self._statistics, batch / application.bounds.init_batch))
        seconds = step + self._accumulation * (step - sync) + self._measuring_seconds(step)
        self._measured_goodput = worth / seconds
        return self._measured_goodput

    def _measuring_seconds(self, step: float) -> float:
        """Return how much longer a replica's mean step takes because some are split to measure the noise scale."""
        if not (self._exact and self.bounds.adaptive) or sum(self.shape) > 1 or self._accumulation:
            return 0.0
        begins, ends = (int(self.application.epoch_ends[epoch]) for epoch in (self.epoch, self.epoch + 1))
        share = _measured_share(begins, max(begins + 1, ends))
        half = self.application.step_seconds(self.shape, math.ceil(self._atomic / 2))[0]
        return share * max(0.0, 2.0 * half - step)

    def _choose_batch(self) -> None:
        replicas, bounds = sum(self.shape), self.application.bounds
        if self._fixed_batch is None and self._statistics is not None:
            params = self._model()
            if params is not None:
                choice = choose_batch(params, self._statistics, bounds, len(self.shape), replicas)
                self._atomic, self._accumulation = choice.atomic_batch, choice.accumulation
                return
        self._atomic, self._accumulation = self.fixed_choice(replicas)

    def fixed_choice(self, replicas: int) -> tuple[int, int]:
        """(atomic batch, accumulation steps) before anything was measured, or with a fixed batch size."""
        bounds = self.application.bounds
        batch = self._fixed_batch or max(bounds.init_batch, bounds.min_atomic * replicas)
        local = math.ceil(batch / replicas - 1e-8)
        accumulation = math.ceil(local / bounds.largest_atomic - 1e-8) - 1
        if replicas == 1 and batch > bounds.init_batch:
            # One replica reads the noise scale from the parts of an accumulated batch.
            accumulation = max(1, accumulation)
        atomic = math.ceil(local / (accumulation + 1) - 1e-8)
        return min(atomic, int(bounds.max_batch / (replicas * (accumulation + 1)))), accumulation

    def steps_left(self) -> float:
        """Return the number of steps left at the fixed batch size, from the measured traces."""
        last, batch = len(self.application.epoch_ends) - 2, self._fixed_batch or self.application.bounds.init_batch
        if last <= self.epoch:
            return 1.0
        return self.application.steps_at(batch, last) - self.application.steps_at(batch, self.epoch)

    def _model(self) -> ThroughputParams | None:
        """Return the throughput model; None with a layout that nothing was measured with."""
        rows = [row for key, row in self._rows.items() if key.layout == self.layout]
        size = len(self._rows), len({(*key[:2], *key[3:]) for key in self._rows})
        if not rows:
            return None
        if self._params is None or size[1] > self._fitted[1] or size[0] >= REFIT_GROWTH * self._fitted[0]:
            self._params = fit_throughput(rows, warm_start=self._params)
            self._fitted = size
        return self._params

    # ------------------------------------------------------------------ what it says

    def hints(self, *, declares_length: bool, pause_seconds: float) -> Hints:
        init_batch = self.application.bounds.init_batch
        ends = self.application.epoch_ends
        whole = self.submission.declared_progress or float(ends[-1]) * init_batch
        begun, end = ends[self.epoch], ends[min(self.epoch + 1, len(ends) - 1)]
        return Hints(
            bounds=self.bounds,
            observations=tuple(self._rows.values()),
            statistics=self._statistics,
            progress=self.progress * init_batch,
            target_progress=whole if declares_length else None,
            epoch=self.epoch,
            epoch_fraction=float((self.progress - begun) / (end - begun)) if end > begun else 0.0,
            global_batch=self.global_batch,
            goodput=self._measured_goodput * init_batch,
            rescale_pause_seconds=pause_seconds,
            slots_per_share=self.share_size,
            layout=self.layout,
            layouts=() if self.submission.choices is None else self.submission.choices.terms,
            slot_memory_bytes=None if self.submission.choices is None else self.submission.choices.slot_memory_bytes,
        )

    def refusal(self, layout: str) -> Hints:
        """Return the hints of a replica that leaves because it has no room."""
        choices = self.submission.choices
        assert choices is not None
        name = str(choices.named(layout))
        return Hints(bounds=None, layout=name, layouts=choices.terms, slot_memory_bytes=choices.slot_memory_bytes)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a simulated job's slots.

    ``goodput``: before it, in any unit that is the same for all changes of a job.
    """

    at: float
    before: int
    after: int
    goodput: float
    pause_seconds: float

    def is_undone_by(self, slots: int, goodput: float, now: float) -> bool:
        """Tell whether a change to so many slots takes this one back before it has paid for its pause.

        ``goodput``: after this change. What is gained with more slots, for this trial or by giving them to others,
        makes up for what the pause has cost after pause * larger / (larger - smaller).
        """
        back = slots <= self.before if self.after > self.before else slots >= self.before
        smaller, larger = sorted((self.goodput, goodput))
        return back and (larger <= smaller or now - self.at < self.pause_seconds * larger / (larger - smaller))
