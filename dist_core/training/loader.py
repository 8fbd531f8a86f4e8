"""AdaptiveDataLoader: batches whose size follows the trial's allocation and statistics, every sample once a pass.

The first loader that trains sets the pace: between its batches generations switch and batch sizes change. Further
loaders may train in the same epoch, one after another, with a fixed batch size. A loop trains when gradients are on and
a wrapped model is in training mode; any other loop evaluates, each replica its share.

Within ``remaining_epochs_until`` an epoch of the first training loader is an epoch's worth of progress at the initial
batch size. With a fixed batch size that is exactly one pass over the data; with an adaptive one, larger batches make
less progress per example, so an epoch takes somewhat more than a pass, and epoch numbers mean the same in all trials.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from dist_core.data.division import Division, LoadedStep
from dist_core.data.order import StepPlan
from dist_core.data.parted_source import PartedSource
from dist_core.data.source import batch_source
from dist_core.errors import InvalidTraining, RunAgain
from dist_core.generations.decision import fingerprint
from dist_core.goodput import BatchBounds, Configuration, fixed_choice
from dist_core.tensorboard import write_scalars
from dist_core.torch_private import compiled_graphs
from dist_core.trial.core import TrainingCore, get_core

_MOST_DRY_BATCHES = 64
"""A joiner that has taken no gradient by then takes none in this loop."""
_PROGRESS_TOLERANCE = 1e-9


class AdaptiveDataLoader:
    """Like ``torch.utils.data.DataLoader``; ``batch_size`` is the global one.

    ``batch_size`` is the total over all replicas, and the size the learning rate was chosen for. ``sampler`` draws
    single indices; it is drawn from once a pass, with the same seed on every replica. An iterable dataset is read as a
    whole by every replica, which keeps its part; with ``num_workers`` of 2 or more it is divided among the workers of
    all replicas, each of which learns its part from ``torch.utils.data.get_worker_info()``. ``epoch_size`` is the
    number of samples that count as an epoch, where the dataset does not know its length. Further keyword arguments go
    to torch's DataLoader.

    Raises InvalidTraining for arguments that contradict each other, and for ``batch_sampler``: batches are cut here.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        *,
        seed: int = 0,
        epoch_size: int | None = None,
        **options: Any,
    ) -> None:
        if options.pop("batch_sampler", None) is not None:
            raise InvalidTraining(
                "AdaptiveDataLoader was given a batch_sampler; it cuts batches itself, because their size follows the "
                "allocation. Give a sampler that draws single indices"
            )
        if epoch_size is not None and epoch_size < 1:
            raise InvalidTraining(f"epoch_size is {epoch_size}; it must be at least 1 sample, or None")
        self.drop_last = bool(options.pop("drop_last", False))
        try:
            size = operator.index(batch_size)
            self.bounds = BatchBounds(init_batch=size, max_batch=size)
        except (ValueError, TypeError) as error:
            raise InvalidTraining(str(error)) from error
        self.dataset = dataset
        self._source = batch_source(dataset, shuffle=shuffle, seed=seed, sampler=sampler, options=options)
        self._note_workers(get_core())
        self._epoch_size = epoch_size
        self._autoscaled = False
        self._name: str | None = None
        self._division: Division | None = None
        self._open: StepPlan | None = None
        """The step whose last batch is with the user's code, until it is counted."""
        self._completed: StepPlan | None = None
        """The step that was counted while its iterator was still held."""
        self._handed_out = self._promised = self._uncounted = 0
        """Batches that the present loop's body was given, that ``len`` says, and of steps that did not count."""
        self._may_be_counted = False
        """Whether anybody has asked how many batches there are."""

    def _note_workers(self, core: TrainingCore) -> None:
        """Before replicas meet, where that is possible: they have to divide streams alike."""
        if isinstance(self._source, PartedSource):
            core.habits.note_stream_workers(self._source.workers)

    @property
    def batch_size(self) -> int:
        return self.bounds.init_batch

    @property
    def cursor(self) -> Any:
        """Where in the data training stands."""
        return self._source.cursor

    @property
    def order_fingerprint(self) -> int:
        """16 bits of where this loader stands, and of the order it goes through."""
        cursor = self.cursor
        return fingerprint([self._source.order_fingerprint, cursor.passes, cursor.position, get_core().position.epoch])

    @property
    def epoch_size(self) -> int | None:
        """Samples that make an epoch; None when nobody knows."""
        return self._epoch_size or self._source.num_samples

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size follow goodput, up to ``max_batch_size`` in total and within the bounds per replica.

        Raises InvalidTraining for bounds that contradict each other or the batch size.
        """
        lower, upper = local_bsz_bounds if local_bsz_bounds is not None else (None, None)
        if (lower is not None and lower > self.batch_size) or (upper is not None and upper < self.batch_size):
            raise InvalidTraining(
                f"batch_size is {self.batch_size} but local_bsz_bounds are {local_bsz_bounds}; "
                "the bounds must contain batch_size, because one replica starts with it"
            )
        if self.epoch_size is None:
            raise InvalidTraining(
                f"{type(self.dataset).__name__} has no length, and with a batch size that adapts an epoch is an amount "
                "of progress; say how many samples make one: AdaptiveDataLoader(..., epoch_size=...)"
            )
        try:
            self.bounds = BatchBounds(
                init_batch=self.batch_size,
                max_batch=int(max_batch_size),
                min_atomic=1 if lower is None else int(lower),
                max_atomic=None if upper is None else int(upper),
                accumulation=gradient_accumulation,
            )
        except (ValueError, TypeError) as error:
            raise InvalidTraining(str(error)) from error
        self._autoscaled = True

    def __len__(self) -> int:
        """Batches a pass takes at the present batch size. Raises TypeError, as torch does, when nobody knows.

        For a joiner, more than it will be given, so that code which counts batches does not leave before the others.
        """
        self._may_be_counted = True
        return self._batches_of_pass()

    def _batches_of_pass(self) -> int:
        if self.epoch_size is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length; give AdaptiveDataLoader an epoch_size")
        whole, rest = divmod(self.epoch_size, self.current_batch_size)
        core = get_core()
        dry = _MOST_DRY_BATCHES if core.generation.is_outside else 0
        return whole + (rest > 0 and not self.drop_last) + dry

    @property
    def _paces(self) -> bool:
        """Whether this is the loader whose batch size adapts."""
        return get_core().loader is self

    @property
    def current_batch_size(self) -> int:
        """Global batch size of the next step."""
        core = get_core()
        if self._paces and core.adaptation is not None:
            return core.adaptation.global_batch(core.generation.group.world_size)
        return self.batch_size

    @property
    def current_local_bsz(self) -> int:
        """Examples of one forward and backward pass on a replica."""
        core = get_core()
        if self._paces and core.adaptation is not None and core.adaptation.bounds.adaptive:
            return core.adaptation.atomic_batch
        return fixed_choice(self.bounds, core.generation.group.world_size)[0]

    @property
    def accumulation_steps(self) -> int:
        """Passes of a step before the one that reduces gradients."""
        core = get_core()
        return core.adaptation.accumulation if self._paces and core.adaptation is not None else 0

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write batch sizes and accumulation steps as scalars under ``tag_prefix``."""
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self.current_local_bsz,
            "Accumulation_Steps": self.accumulation_steps,
        }
        write_scalars(writer, global_step, tag_prefix, values)

    def commit(self, taken: int) -> None:
        """A step over ``taken`` samples counts."""
        assert self._division is not None
        self._source.commit(taken, self._division)

    def take_over(self, before: AdaptiveDataLoader) -> None:
        """Go on where another loader over the same data stands; the script makes a new one each epoch."""
        core = get_core()
        self.cursor.load_state_dict(before.cursor.state_dict())
        assert before._name is not None
        self._name = before._name
        core.registry.replace(self._name, self.cursor)
        if core.adaptation is not None:
            core.adaptation.use_bounds(self.bounds)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        core = get_core()
        self._note_workers(core)
        if not torch.is_grad_enabled() or not (self._autoscaled or core.models):
            return self._evaluate(core)
        if core.models and not any(model.training for model in core.models):
            trains_elsewhere = self._autoscaled or self._name is not None
            return self._train_unless_it_evaluates(core) if trains_elsewhere else self._evaluate_unless_it_trains(core)
        return self._train(core)

    def _refuse_outside_of_epochs(self, core: TrainingCore) -> None:
        if not core.position.in_epoch_loop and core.environment is not None:
            raise InvalidTraining(
                "a training loop over AdaptiveDataLoader runs outside remaining_epochs_until(); write "
                "`for epoch in remaining_epochs_until(num_epochs):` around it so that the trial can be rescaled"
            )

    def _train_unless_it_evaluates(self, core: TrainingCore) -> Iterator[Any]:
        """As below, over a loader that is known to train: a trainer may put its model into training mode in the body.

        If nobody trained on the first batch, it was the first of an evaluation, which goes on with the other samples.
        """
        if not core.position.in_epoch_loop and core.environment is not None:
            yield from self._evaluate_unless_it_trains(core)
            return
        steps = self._train(core)
        try:
            first = next(steps, None)
            seen = None if self._open is None else (self.cursor.position, self._open.global_batch)
            if first is None:
                return
            yield first
            if any(model.training or model.stepped for model in core.models):
                yield from steps
                return
        finally:
            steps.close()  # type: ignore[attr-defined]  # a generator
        self.cursor.left = False
        yield from self._evaluate_unless_it_trains(core, seen)

    def _evaluate_unless_it_trains(self, core: TrainingCore, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        """All models are in evaluation mode and gradients on: somebody evaluates, or trains with frozen statistics.

        What tells is an optimizer that steps. What ran until then is undone, and the loop begins as one that trains.
        """
        undo = core.way_back.remember()
        trained = False
        for model in core.models:
            model.begin_probe()
        try:
            for batch in self._evaluate(core, seen):
                yield batch
                trained = any(model.stepped for model in core.models)
                if trained:
                    break
        finally:
            for model in core.models:
                model.end_probe(trained=trained)
        if trained:
            undo()
            yield from self._train(core)

    def _evaluate(self, core: TrainingCore, seen: tuple[int, int] | None = None) -> Iterator[Any]:
        core.loops.go_on_behind()
        run = core.position.runs
        core.loops.evaluations += 1
        core.position.has_evaluated |= not core.position.in_training_loop
        try:
            for batch in self._share(core, seen):
                core.saving.leave_evaluation_if_asked()
                yield batch
        finally:
            core.loops.evaluations -= core.position.runs == run

    def _share(self, core: TrainingCore, seen: tuple[int, int] | None) -> Iterator[Any]:
        """One pass without training: this replica's share of the samples, nothing shared with the others.

        ``seen``: first and number of those, in the order of training, that the replicas have had already.
        """
        rank, world_size = core.generation.group.rank, core.generation.group.world_size
        samples = self._source.num_samples
        batch = self.batch_size
        if samples is not None and -(-samples // batch) < world_size:
            batch = -(-batch // world_size)
        workers = core.habits.stream_workers or 1
        return self._source.evaluation(rank=rank, world_size=world_size, batch=batch, workers=workers, seen=seen)

    def _train(self, core: TrainingCore) -> Iterator[Any]:
        self._refuse_outside_of_epochs(core)
        core.raise_postponed()
        core.pacing.adopt(self)
        if self._name is None:
            self._name = core.registry.unique_name("loader")
            core.registry.register(self._name, self.cursor)
        if not core.joined:
            yield from self._dry_steps(core)
        if core.loops.stands_behind_next:
            # And behind all that the code before it has just done once more.
            core.way_back.go_back_behind_loop()
        started_passes = self._passes_before(core)
        if self._was_completed(core, started_passes):
            try:
                yield from self._once_more(core)
            except GeneratorExit:
                # The user left the body, as it may have done when the loop ran: it is over all the same.
                if any(model.stepped for model in core.models):
                    core.position.loops_begun += 1
                    core.position.leave_loop()
                    core.way_back.begin_between_loops()
                raise
        if not core.joined:
            core.changes.come_in()
        if not core.loops.begin():
            return
        self.cursor.begin_loop()
        self._source.begin_loop()
        if started_passes is None:
            started_passes = self.cursor.passes
        core.position.loop_start = (core.position.loops_begun, started_passes)
        steps_before = core.position.steps
        self._handed_out = self._uncounted = 0
        self._promised = self._batches_of_pass() if self.epoch_size is not None else 0
        try:
            ran_out = yield from self._train_steps(core, started_passes, steps_before)
        finally:
            self._source.end_loop()
        if ran_out:
            core.loops.end()

    def _train_steps(self, core: TrainingCore, started_passes: int, steps_before: int) -> Generator[Any, None, bool]:
        """The loop's steps; False when the epoch ended in its middle, which an iterator that is still held allows."""
        run = core.position.runs
        while not self._is_over(core, started_passes):
            for step in self._steps_under_present_plan(core, started_passes):
                pass_began = time.perf_counter()
                micro_seconds: list[float] = []
                core.sums.mark()
                for index, batch in enumerate(step.batches):
                    for model in core.models:
                        model.begin_micro_batch(step.plan, index, measures=step.measures)
                    self._handed_out += 1
                    self._open = step.plan if index == len(step.batches) - 1 else None
                    try:
                        yield batch
                    except GeneratorExit:
                        # Held by what has ended, and let go of when the code runs again, it has nothing to say.
                        if core.position.runs == run:
                            self._leave_early(core, step.plan, core.position.steps > steps_before)
                        raise
                    micro_seconds.append(self._seconds_since(core, step.plan, index, pass_began))
                    pass_began = time.perf_counter()
                if self._open is None:
                    # It has counted the step.
                    return False
                self._open = None
                self._note_times(core, step.plan, micro_seconds, step.measures)
                steps_so_far = core.position.steps
                core.steps.finish(self, step.plan.global_batch)
                if core.position.steps == steps_so_far:
                    self._uncounted += len(step.batches)
        return True

    def _seconds_since(self, core: TrainingCore, step: StepPlan, index: int, began: float) -> float:
        """How long a pass took; on a device that is emulated, as long as there."""
        device = core.emulated_device
        if device is None:
            return time.perf_counter() - began
        reduces = index == len(step.micro_batches) - 1
        group, size = core.generation.group, len(step.micro_batches[index])
        return device.hold(began, device.pass_seconds(group.num_nodes, group.world_size, size, reduces=reduces))

    def _leave_early(self, core: TrainingCore, step: StepPlan, has_trained: bool) -> None:
        """The user broke out of the loop: a step that was applied counts, a batch that was only looked at does not.

        The next loop begins a new pass, as it does with torch's loader.
        """
        self._open = None
        if step is self._completed:
            return
        # One that a replica was lost in has not stepped.
        lost = core.broken is not None and any(model.passed_step for model in core.models)
        stepped = lost or any(model.stepped for model in core.models)
        steps_so_far = core.position.steps
        core.loops.leave_early(self, has_trained=has_trained or stepped)
        self.cursor.left |= has_trained or stepped
        try:
            if stepped:
                core.steps.finish(self, step.global_batch)
            core.way_back.begin_between_loops()
        except BaseException as error:
            core.leaving.postpone(error)
        finally:
            for model in core.models:
                model.leave_step()
        uncounted = stepped and core.position.steps == steps_so_far
        self._uncounted += uncounted * len(step.micro_batches)
        start = core.position.loop_start
        is_left = bool(self.cursor.position) or (start is not None and self.cursor.passes == start[1])
        left_by_count = self._handed_out == self._promised and self.cursor.left and is_left
        if left_by_count and self._uncounted and self._may_be_counted and not core.models.staleness:
            # Whoever counts batches leaves before all samples were trained.
            core.leaving.postpone(RunAgain(in_loop=True))
        elif uncounted:
            core.warn("the training loop was left at a step in which a replica was lost: that step does not count")
        elif left_by_count:
            core.warn(
                f"the training loop was left after {self._handed_out} batches, as many as len(loader) said when it "
                "began; with a batch size that adapts a pass takes another number. Code that counts batches should "
                "let the loop run to its end"
            )

    def complete_step(self) -> None:
        """The epoch ends while an iterator over this loader is still held: its last step counts now."""
        core = get_core()
        step = self._open
        if step is not None:
            self._leave_early(core, step, has_trained=True)
            self._completed = step
            core.raise_postponed()

    def _dry_steps(self, core: TrainingCore) -> Iterator[Any]:
        """Passes of a joiner that is still alone; what they change is overwritten when it joins."""
        for _ in range(_MOST_DRY_BATCHES):
            if not core.generation.dry_steps_left:
                break
            core.generation.dry_steps_left -= 1
            for model in core.models:
                model.begin_dry_step()
            try:
                yield from self._source.first_samples(self._dry_samples(core))
            finally:
                # A batch that was only looked at built no bucket, nor did one whose gradient is summed up for later.
                core.generation.dry_steps_left += not any(model.took_gradients for model in core.models)
        core.generation.dry_steps_left = 0
        for model in core.models:
            model.end_dry_steps()

    def _passes_before(self, core: TrainingCore) -> int | None:
        """Passes over the data before the loop that begins, where the trial was resumed within that very loop."""
        if core.position.is_resumed and not core.generation.joining and core.position.loop_start is not None:
            number, passes = core.position.loop_start
            if number == core.position.loops_begun + 1:
                return passes
        return None

    def _was_completed(self, core: TrainingCore, started_passes: int | None) -> bool:
        """Whether the loop that begins has nothing left: the trial was resumed behind it, in the same epoch."""
        if not core.position.is_resumed or core.generation.joining:
            return False
        if core.position.loops_begun < core.position.loops_done:
            return True
        if self._ends_by_progress and core.position.loops_begun == 0:
            return self._has_progressed(core)
        return started_passes is not None and bool(self.cursor.passes > started_passes)

    def _once_more(self, core: TrainingCore) -> Iterator[Any]:
        """The body of a loop that was completed before, for what the code after it needs; it changes nothing."""
        undo, run = core.way_back.remember(), core.position.runs
        core.generation.dry_steps_left, core.loops.replaying = 1, True
        for model in core.models:
            model.begin_dry_step()
        try:
            yield from self._source.first_samples(self._dry_samples(core))
        finally:
            if core.position.runs == run:
                core.generation.dry_steps_left, core.loops.replaying = 0, False
                for model in core.models:
                    model.end_dry_steps()
                undo()

    def _is_over(self, core: TrainingCore, started_passes: int) -> bool:
        """Whether this loop ends here: an epoch's progress is made by the first loop of the first loader."""
        if not (self._ends_by_progress and core.position.in_epoch_loop and core.position.is_first_loop):
            return bool(self.cursor.passes > started_passes)
        return self._has_progressed(core)

    @property
    def _ends_by_progress(self) -> bool:
        """Whether this loader's first loop of an epoch ends with the epoch's progress, and not with a pass."""
        return self._paces and self.epoch_size is not None and (self.bounds.adaptive or not self.drop_last)

    def _has_progressed(self, core: TrainingCore) -> bool:
        assert self.epoch_size is not None
        target = (core.position.epoch + 1) * self.epoch_size
        return core.position.epoch_progress >= target * (1 - _PROGRESS_TOLERANCE)

    def _dry_samples(self, core: TrainingCore) -> int:
        return max(2, min(self.batch_size, 32, core.memory_limit.most_examples or 32))

    def _steps_under_present_plan(self, core: TrainingCore, started_passes: int) -> Iterator[LoadedStep]:
        """Load steps ahead until something changes: generation, batch size, end of the epoch."""
        key = self._plan_key(core)
        self._division = self._present_division(core)
        steps = self._source.steps(self._division)
        while self._plan_key(core) == key and not self._is_over(core, started_passes):
            began = self.cursor.passes
            step = next(steps, None)
            if step is None:
                return
            yield step
            if self.cursor.passes != began and not self.bounds.adaptive:
                return

    def _plan_key(self, core: TrainingCore) -> tuple[int, ...]:
        assert core.adaptation is not None
        adaptation = core.adaptation
        return (
            core.generation.number,
            core.generation.group.world_size,
            adaptation.atomic_batch,
            adaptation.accumulation,
            int(core.habits.trains_in_turns),
        )

    def _present_division(self, core: TrainingCore) -> Division:
        assert core.adaptation is not None
        adaptive = self._paces and self.bounds.adaptive
        return Division(
            rank=core.generation.group.rank,
            world_size=core.generation.group.world_size,
            global_batch=self.current_batch_size,
            accumulation=core.adaptation.accumulation if self._paces else 0,
            first_step=core.position.steps,
            measures=functools.partial(core.models.measures, num_replicas=core.generation.group.world_size),
            splits_measured=core.generation.group.world_size == 1 and adaptive and not core.habits.trains_in_turns,
            splits_first=fixed_choice(self.bounds, core.generation.group.world_size)[1] > 0,
            varies=adaptive,
            drop_last=self.drop_last and not adaptive,
            stream_workers=core.habits.stream_workers or 1,
            note_round=core.record.note_meeting,
            agree=core.meeting.sum_between_steps,
        )

    def _note_times(self, core: TrainingCore, step: StepPlan, seconds: list[float], measures: bool) -> None:
        """Feed the throughput model: the last pass is the one that reduces, the ones before only compute."""
        assert core.adaptation is not None
        world_size = core.generation.group.world_size
        if not self._paces:
            return
        atomic = len(step.micro_batches[-1])
        core.adaptation.size_costs.note(
            atomic, max(seconds), time.monotonic(), generation=core.generation.number, compiles=compiled_graphs() > 0
        )
        if measures and world_size == 1:
            return
        configuration = Configuration(core.generation.group.num_nodes, world_size, atomic, core.adaptation.node_kind)
        sync = max((model.sync_seconds for model in core.models), default=0.0)
        optim = seconds[-1]
        gradient = sum(seconds[:-1]) / len(seconds[:-1]) if len(seconds) > 1 else max(optim - sync, 0.1 * optim)
        if core.emulated_device is not None:
            # What this machine took to reduce them says nothing.
            gradient = core.emulated_device.gradient_seconds(atomic)
        core.adaptation.timed(configuration, gradient_seconds=min(gradient, optim), optim_seconds=optim)


def current_dataloader() -> AdaptiveDataLoader | None:
    """The loader that drives training, once one does."""
    loader = get_core().loader
    assert loader is None or isinstance(loader, AdaptiveDataLoader)
    return loader
