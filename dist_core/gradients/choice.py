"""ReductionChoice: which of the ways to reduce a model's gradients is in use, and which wins."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dist_core.device import Mark
from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.bucket_reducer import BucketLayout, BucketReducer
from dist_core.gradients.noise.norms import segments_of
from dist_core.gradients.reduce import ReductionStrategy
from dist_core.torch_private import gradient_buckets, lay_out_anew, set_bucket_cap


class ReductionChoice:
    """The way in which a model's gradients are reduced, and the trial of others that may be faster.

    Raises InvalidTraining for strategies that cannot be timed against each other.
    """

    def __init__(self, strategies: Sequence[ReductionStrategy], caps_mb: Sequence[float | None]) -> None:
        self._candidates = [Candidate(strategy, cap) for strategy in strategies for cap in caps_mb]
        _refuse_what_cannot_be_timed(self._candidates)
        self._tuner = Tuner(len(self._candidates))
        self._in_use = 0
        self._cap_in_use: float | None = None
        self._layouts_settled = False
        self._stepped: Mark | None = None

    @property
    def strategy(self) -> ReductionStrategy:
        return self._candidates[self._in_use].strategy

    @property
    def group_needs(self) -> GroupNeeds:
        needs = GroupNeeds()
        for candidate in self._candidates:
            needs |= candidate.strategy.needs
        return needs

    # ------------------------------------------------------------------ another group

    def refuse(self, group: ReplicaGroup, needs: GroupNeeds) -> None:
        """Raise InvalidTraining when the group lacks what the model needs."""
        if group.world_size > 1 and not group.meets(needs):
            raise InvalidTraining(
                f"{self._candidates[0].strategy.name} needs process groups that this generation was built without; "
                "wrap models in AdaptiveDataParallel before the first training step"
            )

    def enter(self, group: ReplicaGroup, model: DistributedDataParallel, reducer: BucketReducer) -> None:
        for each in self._candidates:
            # All of them: whoever kept the old group would keep its connections open, by which others learn of a loss.
            each.strategy.enter(group)
        self._tuner.enter(group.world_size, group.num_nodes)
        self._use(self._tuner.candidate, model, reducer, fresh=group.world_size > 1)

    def _use(self, index: int, model: DistributedDataParallel, reducer: BucketReducer, *, fresh: bool) -> None:
        """Reduce as this candidate says. ``fresh``: new buckets even if the size is the same, as joiners have them."""
        self._in_use = index
        candidate = self._candidates[index]
        reducer.strategy = candidate.strategy
        if candidate.cap_mb is not None and (fresh or candidate.cap_mb != self._cap_in_use):
            set_bucket_cap(model, candidate.cap_mb)
            self._cap_in_use = candidate.cap_mb
        self._layouts_settled = False
        reducer.layouts.clear()

    # ------------------------------------------------------------------ how buckets lie

    def lay_out_anew(self, group: ReplicaGroup, model: DistributedDataParallel, reducer: BucketReducer) -> None:
        """Make buckets for the weights that require a gradient now; all replicas at the same step."""
        lay_out_anew(model)
        for each in self._candidates:
            each.strategy.enter(group)
        self._layouts_settled = False
        reducer.layouts.clear()

    def read_layouts(self, model: DistributedDataParallel, reducer: BucketReducer, *, are_rebuilt: bool) -> None:
        """Read which parameters lie in which bucket; torch lays them out anew once, after a group's first step."""
        layouts = reducer.layouts
        if layouts and self._layouts_settled:
            return
        layouts.clear()
        for bucket in gradient_buckets(model):
            description = bucket if self.strategy.reads_layout else None
            layouts.append(BucketLayout(description, segments_of(bucket.parameters())))
        self._layouts_settled = are_rebuilt

    # ------------------------------------------------------------------ which one wins

    def time_step(self, mark: Callable[[], Mark], *, world_size: int) -> None:
        """Time an update; ``mark`` marks the device's present place."""
        if world_size == 1 or self._tuner.settled:
            self._stepped = None
            return
        now, before = mark(), self._stepped
        self._stepped = now
        if before is not None:
            # These few steps are waited for: each time has to be that of the candidate in use.
            now.wait()
            self._tuner.timed(now.seconds_since(before))

    @property
    def proposal(self) -> int | None:
        """Return the candidate to keep, on rank 0 once all have been timed; None before, and after it was announced."""
        return self._tuner.proposal

    def tune(self, announced: int | None, model: DistributedDataParallel, reducer: BucketReducer) -> None:
        """Go to the next candidate, or to the one that rank 0 announced; on all replicas, at a step boundary."""
        if self._tuner.settled:
            return
        if announced is not None:
            self._tuner.settle(announced)
        else:
            self._tuner.advance()
        if self._tuner.candidate != self._in_use:
            self._use(self._tuner.candidate, model, reducer, fresh=False)

    def state_dict(self) -> dict[str, Any]:
        return self._tuner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tuner.load_state_dict(state)


def _refuse_what_cannot_be_timed(candidates: Sequence[Candidate]) -> None:
    for strategy in (candidate.strategy for candidate in candidates if len(candidates) > 1):
        if not strategy.comparable:
            raise InvalidTraining(
                f"{strategy.name} cannot be compared with other reductions or bucket sizes, because a few early "
                "steps do not show its speed; choose it alone, and leave bucket_cap_mb out or give one size"
            )


ROUNDS = 3
SKIPPED_STEPS = 3
"""Steps of each turn that are not timed: the first with new buckets lay them out anew."""
TIMED_STEPS = 6
CLEARLY_FASTER = 0.98


@dataclass(frozen=True, slots=True)
class Candidate:
    strategy: ReductionStrategy
    cap_mb: float | None
    """Bucket size; None leaves it as the user or torch set it."""


class Tuner:
    def __init__(self, num_candidates: int) -> None:
        self._num_candidates = num_candidates
        self._fastest_by_size: dict[str, int] = {}
        self._key = ""
        self._restart()

    def _restart(self) -> None:
        self._turn = self._steps = 0
        self._times: list[list[float]] = [[] for _ in range(self._num_candidates)]

    def enter(self, world_size: int, num_nodes: int) -> None:
        """Begin a generation of this size; what was found for the same size before holds."""
        self._key = f"{num_nodes}x{world_size}"
        self._restart()

    @property
    def settled(self) -> bool:
        return self._num_candidates == 1 or self._key in self._fastest_by_size

    @property
    def candidate(self) -> int:
        """Index of the candidate for this step: the fastest one once settled, else the next one to time."""
        if self.settled:
            return self._fastest_by_size.get(self._key, 0)
        return 0 if self._finished else self._turn % self._num_candidates

    @property
    def _finished(self) -> bool:
        return self._turn >= ROUNDS * self._num_candidates

    def timed(self, seconds: float) -> None:
        """Note the time of a step with the present candidate."""
        if not self._finished and self._steps >= SKIPPED_STEPS:
            self._times[self.candidate].append(seconds)

    def advance(self) -> None:
        """Note that a step is over on all replicas."""
        self._steps += 1
        if not self._finished and self._steps >= SKIPPED_STEPS + TIMED_STEPS:
            self._turn, self._steps = self._turn + 1, 0

    @property
    def proposal(self) -> int | None:
        """The candidate to keep, once all have been timed."""
        if self.settled or not self._finished:
            return None
        medians = [statistics.median(times) if times else float("inf") for times in self._times]
        best = min(range(self._num_candidates), key=medians.__getitem__)
        return best if medians[best] < CLEARLY_FASTER * medians[0] else 0

    def settle(self, index: int) -> None:
        self._fastest_by_size[self._key] = index

    def state_dict(self) -> dict[str, Any]:
        return dict(self._fastest_by_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Made with another choice of candidates, an index would mean something else.
        self._fastest_by_size = {key: index for key, index in state.items() if index < self._num_candidates}
