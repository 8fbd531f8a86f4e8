"""AdaptiveDataLoader: batches whose size follows the trial's allocation and statistics, every sample once a pass.

The first loader that trains (``autoscale_batch_size`` was called, or a wrapped model is in training mode) sets the
pace: between its batches generations switch and batch sizes change. Loading itself is torch's DataLoader, fed with
the planned indices; when a plan changes, what was prefetched for the old one is dropped.

Within ``remaining_epochs_until`` an epoch of the training loader is an epoch's worth of progress at the initial batch
size. With a fixed batch size that is exactly one pass over the data; with an adaptive one, larger batches make less
progress per example, so an epoch takes somewhat more than a pass, and epoch numbers mean the same in all trials.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dist_core.core import TrainingCore, get_core
from dist_core.errors import InvalidTraining
from dist_core.goodput import BatchBounds, Configuration
from dist_core.sampling import ElasticCursor, StepPlan, evaluation_share

_PROGRESS_TOLERANCE = 1e-9


class _PlannedBatches:
    """Batch sampler that walks ahead of the training loop along the plan as it stands now."""

    def __init__(self) -> None:
        self.batches: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches


class AdaptiveDataLoader:
    """Like ``torch.utils.data.DataLoader`` over a map-style dataset; ``batch_size`` is the global one.

    ``batch_size`` is the total over all replicas, and the size the learning rate was chosen for. Further keyword
    arguments go to torch's DataLoader; ``sampler`` and ``batch_sampler`` are refused, because the order of samples
    has to survive changes of the number of replicas.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int = 1, shuffle: bool = False, *, seed: int = 0, **options: Any
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if options.get(name) is not None:
                raise InvalidTraining(
                    f"AdaptiveDataLoader was given a {name}; it orders samples itself so that the order survives "
                    "rescaling. Use shuffle=, or index the dataset through torch.utils.data.Subset"
                )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InvalidTraining(
                f"{type(dataset).__name__} has no length; AdaptiveDataLoader needs a map-style dataset "
                "(__len__ and __getitem__)"
            )
        self.drop_last = bool(options.pop("drop_last", False))
        try:
            self.bounds = BatchBounds(init_batch=batch_size, max_batch=batch_size)
        except (ValueError, TypeError) as error:
            raise InvalidTraining(str(error)) from error
        self.dataset = cast("Sized", dataset)
        self.cursor = ElasticCursor(len(self.dataset), shuffle=shuffle, seed=seed)
        self._planned = _PlannedBatches()
        if options.get("num_workers"):
            options.setdefault("persistent_workers", True)
        self._loader = DataLoader(dataset, batch_sampler=cast("Any", self._planned), **options)
        self._autoscaled = False
        self._registered = False

    @property
    def batch_size(self) -> int:
        return self.bounds.init_batch

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size follow goodput, up to ``max_batch_size`` in total and within the bounds per replica.

        Raises InvalidTraining for bounds that contradict each other or the batch size.
        """
        lower, upper = local_bsz_bounds if local_bsz_bounds is not None else (1, None)
        if local_bsz_bounds is not None and upper is not None and not lower <= self.batch_size <= upper:
            raise InvalidTraining(
                f"batch_size is {self.batch_size} but local_bsz_bounds are {local_bsz_bounds}; "
                "the bounds must contain batch_size, because one replica starts with it"
            )
        try:
            self.bounds = BatchBounds(
                init_batch=self.batch_size,
                max_batch=max_batch_size,
                min_atomic=lower,
                max_atomic=upper,
                accumulation=gradient_accumulation,
            )
        except (ValueError, TypeError) as error:
            raise InvalidTraining(str(error)) from error
        self._autoscaled = True

    def __len__(self) -> int:
        """Batches a pass takes at the present batch size."""
        core = get_core()
        batch = self.batch_size
        if core.loader is self and core.adaptation is not None:
            batch = core.adaptation.global_batch(core.group.world_size)
        whole, rest = divmod(len(self.dataset), batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def current_batch_size(self) -> int:
        """Global batch size of the next step."""
        core = get_core()
        if core.loader is self and core.adaptation is not None:
            return core.adaptation.global_batch(core.group.world_size)
        return self.batch_size

    def commit(self, taken: int) -> None:
        """A step over ``taken`` samples counts; with ``drop_last`` a rest too small for another ends the pass."""
        if not self.cursor.commit(taken) and self._drops(self.cursor):
            self.cursor.commit(self.cursor.remaining)

    def _drops(self, cursor: ElasticCursor) -> bool:
        """Whether the rest of the pass is left out; a batch size that adapts needs no leaving out."""
        return self.drop_last and not self.bounds.adaptive and cursor.remaining < self.batch_size

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        core = get_core()
        trains = torch.is_grad_enabled() and (
            core.loader is self
            or (core.loader is None and (self._autoscaled or any(model.training for model in core.models)))
        )
        if not trains:
            return self._evaluate(core)
        if not core.in_epoch_loop and core.environment is not None:
            raise InvalidTraining(
                "a training loop over AdaptiveDataLoader runs outside remaining_epochs_until(); write "
                "`for epoch in remaining_epochs_until(num_epochs):` around it so that the trial can be rescaled"
            )
        return self._train(core)

    def _evaluate(self, core: TrainingCore) -> Iterator[Any]:
        """One pass without training: this replica's share of the samples, nothing shared with the others."""
        indices = list(evaluation_share(len(self.dataset), rank=core.group.rank, world_size=core.group.world_size))
        size = max(1, self.batch_size // core.group.world_size)
        self._planned.batches = iter(indices[start : start + size] for start in range(0, len(indices), size))
        yield from self._loader

    def _train(self, core: TrainingCore) -> Iterator[Any]:
        core.raise_postponed()
        core.adopt_loader(self)
        if not self._registered:
            self._registered = True
            core.registry.register(core.registry.unique_name("loader"), self.cursor)
        if not core.joined:
            yield from self._dry_steps(core)
            core.join()
        started_passes = self.cursor.passes
        core.in_training_loop = True
        while not self._epoch_is_over(core, started_passes):
            for plan in self._steps_under_present_plan(core, started_passes):
                pass_began = time.perf_counter()
                micro_seconds: list[float] = []
                for index, batch in enumerate(plan.batches):
                    for model in core.models:
                        model.begin_micro_batch(plan.step, index, measures=plan.measures)
                    try:
                        yield batch
                    except GeneratorExit:
                        self._leave_early(core, plan.step)
                        raise
                    now = time.perf_counter()
                    micro_seconds.append(now - pass_began)
                    pass_began = now
                self._note_times(core, plan.step, micro_seconds, plan.measures)
                core.finish_step(plan.step.global_batch)
        core.end_training_loop()

    def _leave_early(self, core: TrainingCore, step: StepPlan) -> None:
        """The user broke out of the loop: a step that was applied counts, a batch that was only looked at does not."""
        if not any(model.stepped for model in core.models):
            return
        try:
            core.finish_step(step.global_batch)
        except BaseException as error:
            core.postpone(error)

    def _dry_steps(self, core: TrainingCore) -> Iterator[Any]:
        """Passes of a joiner that is still alone; what they change is overwritten when it joins."""
        count = min(len(self.dataset), max(2, min(self.batch_size, 32)))
        while core.dry_steps_left:
            core.dry_steps_left -= 1
            self._planned.batches = iter([[int(index) for index in range(count)]])
            for model in core.models:
                model.begin_dry_step()
            yield from self._loader
        for model in core.models:
            model.drop_gradients()

    def _epoch_is_over(self, core: TrainingCore, started_passes: int) -> bool:
        if core.loader is self and core.in_epoch_loop:
            target = (core.epoch + 1) * len(self.dataset)
            if self.drop_last and not self.bounds.adaptive:
                return self.cursor.passes > started_passes
            return core.epoch_progress >= target * (1 - _PROGRESS_TOLERANCE)
        return self.cursor.passes > started_passes

    def _steps_under_present_plan(self, core: TrainingCore, started_passes: int) -> Iterator[_LoadedStep]:
        """Load steps ahead until something changes: generation, batch size, end of the epoch."""
        assert core.adaptation is not None
        key = self._plan_key(core)
        plans: list[StepPlan] = []
        self._planned.batches = self._plan_ahead(core, plans)
        batches = iter(self._loader)
        number = 0
        while self._plan_key(core) == key and not self._epoch_is_over(core, started_passes):
            began = self.cursor.passes
            first = next(batches, None)
            if first is None:
                return
            step = plans[number]
            number += 1
            rest = [next(batches) for _ in step.micro_batches[1:]]
            yield _LoadedStep(step, [first, *rest], core.measures(core.steps))
            if self.cursor.passes != began and not self.bounds.adaptive:
                return

    def _plan_key(self, core: TrainingCore) -> tuple[int, int, int, int]:
        assert core.adaptation is not None
        return (core.generation, core.group.world_size, core.adaptation.atomic_batch, core.adaptation.accumulation)

    def _plan_ahead(self, core: TrainingCore, plans: list[StepPlan]) -> Iterator[list[int]]:
        """Indices of this replica's coming micro-batches, on a copy of the cursor that runs ahead of the real one."""
        assert core.adaptation is not None
        ahead = ElasticCursor(len(self.dataset), shuffle=self.cursor.shuffle, seed=self.cursor.seed)
        ahead.load_state_dict(self.cursor.state_dict())
        ahead._order = self.cursor._order
        batch = core.adaptation.global_batch(core.group.world_size)
        steps = core.steps
        while True:
            take = ahead.take(batch, avoid_small_rest=self.bounds.adaptive)
            splits = core.adaptation.accumulation
            measures = core.measures(steps)
            if measures and core.group.world_size == 1 and splits == 0 and self.bounds.adaptive:
                splits = 1
            plan = ahead.plan(take, rank=core.group.rank, world_size=core.group.world_size, accumulation=splits)
            plans.append(plan)
            for indices in plan.micro_batches:
                yield indices.tolist()
            if not ahead.commit(take) and self._drops(ahead):
                ahead.commit(ahead.remaining)
            steps += 1

    def _note_times(self, core: TrainingCore, step: StepPlan, seconds: list[float], measures: bool) -> None:
        """Feed the throughput model: the last pass is the one that reduces, the ones before only compute."""
        assert core.adaptation is not None
        world_size = core.group.world_size
        if core.loader is not self or (measures and world_size == 1):
            return
        atomic = len(step.micro_batches[-1])
        configuration = Configuration(core.group.num_nodes, world_size, atomic)
        sync = max((model.sync_seconds for model in core.models), default=0.0)
        optim = seconds[-1]
        gradient = sum(seconds[:-1]) / len(seconds[:-1]) if len(seconds) > 1 else max(optim - sync, 0.1 * optim)
        core.adaptation.timed(configuration, gradient_seconds=min(gradient, optim), optim_seconds=optim)


class _LoadedStep:
    """A planned step with its batches in memory."""

    __slots__ = ("batches", "measures", "step")

    def __init__(self, step: StepPlan, batches: list[Any], measures: bool) -> None:
        self.step = step
        self.batches = batches
        self.measures = measures


def current_dataloader() -> AdaptiveDataLoader | None:
    """The loader that drives training, once one does."""
    return get_core().loader
