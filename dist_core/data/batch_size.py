"""Keeps one trial's measurements and picks its batch size: profile and noise scale in, (atomic, accumulation) out.

Rank 0 decides; the others follow what the control reduction carries. Decisions are taken often at first and then ever
less so, and only for a predicted gain worth a change, because each change of batch size costs a little statistics: the
noise scale and the step times of the new size have to be learnt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from dist_core.goodput import (
    BatchBounds,
    Configuration,
    GoodputModel,
    GradientStatistics,
    StepProfile,
    ThroughputParams,
    efficiency,
    fit_throughput,
    fixed_choice,
    gain,
    throughput,
)
from dist_core.goodput.observations import Observation

SHORTEST_DECISION_SECONDS = 0.1
LONGEST_DECISION_SECONDS = 1.0
DECISION_SHARE = 0.02
"""Between two decisions passes this share of the time trained so far, within the bounds above."""
WORTHWHILE_GAIN = 1.05
"""Predicted goodput ratio below which the batch size stays (AdaptDL's threshold as well)."""
LARGEST_GROWTH = 2.0
"""Per decision: the critical batch size grows over training, and estimates made at small batches do not reach far."""


class Adaptation:
    def __init__(
        self,
        bounds: BatchBounds,
        statistics: Callable[[], GradientStatistics | None],
        *,
        node_kind: str = "",
        layout: str = "",
    ) -> None:
        """Follow the noise of gradients: ``statistics`` returns what is known of it now, the same on all replicas."""
        self.bounds = bounds
        self.node_kind = node_kind
        self.layout = layout
        self._statistics = statistics
        self.profile = StepProfile()
        self.atomic_batch, self.accumulation = fixed_choice(bounds, 1)
        self.measured_goodput = 0.0
        self._memory_limit: int | None = None
        self._params: ThroughputParams | None = None
        self._began = self._last_decision = time.monotonic()
        self._recent: deque[tuple[float, float]] = deque(maxlen=200)
        self._progress = 0.0
        self._largest_used = 0
        self.size_costs = SizeCosts(self._began)

    # ------------------------------------------------------------------ batch size

    def use(self, atomic: int, accumulation: int) -> None:
        self.atomic_batch, self.accumulation = atomic, accumulation

    def use_bounds(self, bounds: BatchBounds) -> None:
        """Use the user's bounds, stated anew; what memory has taught stays."""
        if self._memory_limit is not None:
            bounds = replace(bounds, max_atomic=max(bounds.min_atomic, min(bounds.largest_atomic, self._memory_limit)))
        self.bounds = bounds

    def limit(self, max_atomic: int) -> None:
        """Limit the examples of a pass: more do not fit into memory."""
        if self.bounds.adaptive and max_atomic < self.bounds.largest_atomic:
            self._memory_limit = max_atomic
            self.use_bounds(self.bounds)
            self.atomic_batch = min(self.atomic_batch, self.bounds.largest_atomic)

    def forbid_accumulation(self) -> None:
        """Make steps of one pass each from now on."""
        if self.bounds.accumulation or self.accumulation:
            self.bounds = replace(self.bounds, accumulation=False)
            self.accumulation = 0

    def global_batch(self, world_size: int) -> int:
        """Examples of the next full step: the fixed batch exactly, or the chosen multiple."""
        if not self.bounds.adaptive:
            return self.bounds.init_batch
        return self.atomic_batch * (self.accumulation + 1) * world_size

    def choose(self, num_nodes: int, num_replicas: int, *, switching: bool = False) -> tuple[int, int]:
        """Return the batch for an allocation; on a switch the global batch is kept as far as the bounds let it."""
        statistics = self._statistics()
        if not self.bounds.adaptive or statistics is None:
            return fixed_choice(self.bounds, num_replicas)
        self._params = fit_throughput(self._rows(), warm_start=self._params)
        if self._params is None:
            return fixed_choice(self.bounds, num_replicas)
        model = GoodputModel(throughput=self._params, statistics=statistics, bounds=self._reachable_bounds())
        choice = model.choose(num_nodes, num_replicas)
        current = float(self._goodput_of(model, num_nodes, num_replicas, self.atomic_batch, self.accumulation))
        if not switching and choice.goodput < WORTHWHILE_GAIN * current:
            return self.atomic_batch, self.accumulation
        ratio = choice.goodput / max(current, 1e-30)
        if self._may_stay(num_replicas) and not self.size_costs.is_repaid(choice.atomic_batch, ratio, time.monotonic()):
            return self.atomic_batch, self.accumulation
        return choice.atomic_batch, choice.accumulation

    def _may_stay(self, num_replicas: int) -> bool:
        """Tell whether a replica's present batch is within the bounds on this many replicas."""
        total = self.atomic_batch * (self.accumulation + 1) * num_replicas
        return self.bounds.init_batch <= total <= self._reachable_bounds().max_batch

    def _rows(self) -> list[Observation]:
        """Measured on nodes of the present kind; on another one as long as there are none. With the present layout."""
        rows = [row for row in self.profile.observations() if row.configuration.layout == self.layout]
        return [row for row in rows if row.configuration.kind == self.node_kind] or rows

    def proposal(self, num_nodes: int, num_replicas: int) -> tuple[int, int] | None:
        """Return a new (atomic, accumulation) when it is time and pays; None otherwise."""
        now = time.monotonic()
        wait = min(LONGEST_DECISION_SECONDS, max(SHORTEST_DECISION_SECONDS, DECISION_SHARE * (now - self._began)))
        if not self.bounds.adaptive or now - self._last_decision < wait:
            return None
        self._last_decision = now
        chosen = self.choose(num_nodes, num_replicas)
        return None if chosen == (self.atomic_batch, self.accumulation) else chosen

    def _reachable_bounds(self) -> BatchBounds:
        """Return the user's bounds, with the largest batch limited to a multiple of the largest used so far."""
        used = max(self.bounds.init_batch, self._largest_used)
        reachable = max(self.bounds.init_batch, min(self.bounds.max_batch, int(LARGEST_GROWTH * used)))
        return replace(self.bounds, max_batch=reachable)

    @staticmethod
    def _goodput_of(model: GoodputModel, num_nodes: int, num_replicas: int, atomic: int, accumulation: int) -> float:
        speed = float(throughput(model.throughput, num_nodes, num_replicas, atomic, accumulation))
        scale = max(1.0, num_replicas * atomic * (accumulation + 1) / model.bounds.init_batch)
        return speed * float(efficiency(model.statistics, scale))

    # ------------------------------------------------------------------ measurements

    def timed(self, configuration: Configuration, *, gradient_seconds: float, optim_seconds: float) -> None:
        self.profile.add(configuration, gradient_seconds=gradient_seconds, optim_seconds=optim_seconds)

    def progress_of(self, global_batch: int) -> float:
        """Progress of a step, in examples at the initial batch size; also feeds the measured goodput."""
        self._largest_used = max(self._largest_used, global_batch)
        progress = self.worth_of(global_batch)
        now = time.monotonic()
        self._progress += progress
        self._recent.append((now, self._progress))
        while len(self._recent) > 2 and now - self._recent[0][0] > 5.0:
            self._recent.popleft()
        first_time, first_progress = self._recent[0]
        if now - first_time > 0.2:
            self.measured_goodput = (self._progress - first_progress) / (now - first_time)
        return progress

    def worth_of(self, global_batch: int) -> float:
        """Examples at the initial batch size that a step of so many is worth, as far as is known now."""
        scale = global_batch / self.bounds.init_batch
        statistics = self._statistics()
        if scale <= 1.0 or statistics is None:
            return float(min(global_batch, self.bounds.init_batch))
        return float(gain(statistics, scale)) * self.bounds.init_batch

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "profile": [row.to_row() for row in self.profile.observations(min_samples=1)],
            "batch": [self.atomic_batch, self.accumulation],
            "largest_used": self._largest_used,
        }

    def inherit(self, state: dict[str, Any]) -> None:
        """Take a parent trial's measurements over; the batch size is this trial's own."""
        self.profile.restore(Observation.from_row(row) for row in state["profile"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.profile.restore(Observation.from_row(row) for row in state["profile"])
        self.atomic_batch, self.accumulation = state["batch"]
        self._largest_used = state["largest_used"]


STEPS_TO_COMPARE = 3
"""The first step at a size, against the median of the following ones."""


class SizeCosts:
    def __init__(self, now: float) -> None:
        """``now``: seconds on a clock that never goes back, as everywhere here."""
        self.seconds = 0.0
        """Seconds that the latest new batch size cost."""
        self._steps: dict[int, list[float]] = {}
        self._last_new = now
        self._generation: int | None = None

    def note(self, atomic: int, seconds: float, now: float, *, generation: int, compiles: bool) -> None:
        """Note the time of a pass at this size.

        The first size of all begins with what is started once in a process, unless there is a model that ``compiles``.
        A generation's first step waits for others, which is no cost of its size.
        """
        is_first_size = not self._steps or (len(self._steps) == 1 and atomic in self._steps)
        is_new = atomic not in self._steps
        steps = self._steps.setdefault(atomic, [])
        if is_new:
            self._last_new = now
        entered, self._generation = generation != self._generation and not is_first_size, generation
        if entered and is_new:
            # Seen, with no word on what it cost.
            steps += [0.0] * STEPS_TO_COMPARE
        if len(steps) == STEPS_TO_COMPARE:
            return
        steps.append(seconds)
        if len(steps) == STEPS_TO_COMPARE and (compiles or not is_first_size):
            self.seconds = max(0.0, steps[0] - median(steps[1:]))

    def is_repaid(self, atomic: int, ratio: float, now: float) -> bool:
        """Tell whether a size with ``ratio`` times the present goodput soon makes up for its cost.

        Soon is the time that the latest new size has been in use by now, so that each change pays before the next.
        """
        if atomic in self._steps or self.seconds == 0.0:
            return True
        return ratio > 1.0 and (now - self._last_new) * (1.0 - 1.0 / ratio) > self.seconds
