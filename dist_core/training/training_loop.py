"""TrainingLoop: one loader's training loops, from their first batch to the last step that counts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dist_core.data.order import Division, LoadedStep, StepPlan
from dist_core.errors import InvalidTraining, RunAgain
from dist_core.goodput import fixed_choice
from dist_core.state.random_streams import seeded
from dist_core.state.seeds import derived_seed
from dist_core.training.loop_code import (
    count_that_decides,
    counts_by_enumerate,
    puts_together,
    sum_over_uncounted_samples,
)
from dist_core.training.step_times import StepTimes
from dist_core.trial.replica import Replica

if TYPE_CHECKING:
    from dist_core.training.loader import AdaptiveDataLoader

MOST_DRY_BATCHES = 64
"""A joiner that has taken no gradient by then takes none in this loop."""
_PROGRESS_TOLERANCE = 1e-9
_MOST_OFF = 0.02
"""Part by which a count of batches may be off unnoticed."""
_LEFT_BY_COUNT = (
    "the training loop was left after {} batches, the value of len(loader) when it began; with an adaptive batch "
    "size, the number of batches in a pass changes. Code that counts batches should let the loop run to its end"
)


def _is_trained(core: Replica) -> bool:
    return any(model.step_place.computed or model.step_place.passed_step for model in core.models)


class BodyCount:
    """Batches that the loop's body was given, a part of a step's batch where that comes in several passes."""

    def __init__(self) -> None:
        self.bodies = 0
        self.uncounted = 0
        """Bodies of steps that did not count."""
        self.worth = 0.0
        """Batches of the script that the steps are worth that did."""


class LoopMarks:
    """Marks of where a loader's loops stand, from one to the next."""

    def __init__(self) -> None:
        self.division: Division | None = None
        """Division of the present steps among the replicas."""
        self.loaded: LoadedStep | None = None
        """The step that a batch with the user's code belongs to."""
        self.open: StepPlan | None = None
        """The step whose last batch is with the user's code, until it is counted."""
        self.completed: StepPlan | None = None
        """The step that was counted while its iterator was still held."""
        self.promised = 0
        """Batches of the present loop, as ``len`` says."""
        self.in_loop, self.in_all = BodyCount(), BodyCount()
        """Batches of the present loop, and of all loops in this process."""
        self.seen: int | None = None
        """Batches that the latest loop's sums are of, once it has run to its end."""
        self.left_out = 0
        """Samples at the next loop's beginning that are not trained, because the script says that they were."""
        self.may_be_counted = False
        """True once anybody has asked how many batches there are."""


class TrainingLoop:
    """One iteration over a loader that trains; ``marks`` are the loader's."""

    def __init__(self, loader: AdaptiveDataLoader, marks: LoopMarks) -> None:
        self._loader = loader
        self._marks = marks

    @property
    def seen(self) -> tuple[int, int] | None:
        """(first sample, number of samples) of the step that the user's code computes; None between steps."""
        step = self._marks.open
        return None if step is None else (self._loader.cursor.position, step.global_batch)

    def train(self, core: Replica) -> Iterator[Any]:
        _refuse_outside_of_epochs(core)
        core.raise_postponed()
        core.pacing.adopt(self._loader)
        if self._loader.name is None:
            self._loader.settle_order()
            self._loader.name = core.registry.unique_name("loader")
            core.registry.register(self._loader.name, self._loader.cursor)
        if not core.joined:
            yield from self._dry_steps(core)
        if core.position.is_behind_next_loop and not core.generation.joining:
            # Resumed within this loop or behind it, and behind all that the code before it has just done once more.
            core.rollback.go_back_behind_loop()
        started_passes = self._passes_before(core)
        if self._was_completed(core, started_passes):
            try:
                yield from self._once_more(core)
            except GeneratorExit:
                # The user left the body, as it may have done when the loop ran: it is over all the same.
                if any(model.step_place.stepped for model in core.models):
                    core.position.pass_over_loop()
                    core.rollback.begin_between_loops()
                raise
        comes_in = not core.joined
        joins = comes_in and core.generation.joining
        if comes_in:
            core.arrival.come_in()
        if not core.loops.begin():
            return
        self._marks.seen = None
        self._loader.cursor.begin_loop()
        # Sums of the part of a pass that is behind a resumed trial of one replica are put back (LoopSums).
        sums_are_older = core.generation.group.world_size == 1 and self._loader.cursor.position > 0
        self._loader.source.begin_loop()
        self._warn_of_enumerate(core, joins=joins)
        self._leave_out_first(core)
        if started_passes is None and comes_in:
            # Others have begun it, whose last step may have just been theirs.
            started_passes = self._passes_at_start_of(core, core.position.loops_begun)
        if started_passes is None:
            started_passes = self._loader.cursor.passes
        core.position.note_loop_start(started_passes)
        if self._has_no_batch:
            self._loader.cursor.end_pass()
        steps_before = core.position.steps
        self._marks.in_loop = BodyCount()
        self._marks.promised = self._loader.batches_of_pass() if self._loader.epoch_size is not None else 0
        try:
            ran_out = yield from self._train_steps(core, started_passes, steps_before)
        finally:
            self._marks.loaded = None
            self._loader.source.end_loop()
        if ran_out:
            count = self._marks.in_loop
            self._marks.seen = None if sums_are_older else count.bodies - count.uncounted
            self._warn_of_sum(core)
            core.habits.loop_ran_out()
            core.loops.end()

    def _warn_of_enumerate(self, core: Replica, *, joins: bool) -> None:
        """Warn of a count of batches that does not begin where this epoch does."""
        goes_on = self._loader.cursor.position > 0 and core.generation.group.rank == 0
        if (joins or goes_on) and counts_by_enumerate():
            why = "this replica joins the trial" if joins else "this epoch goes on behind batches that are trained"
            core.warn(
                f"{why}, and enumerate() does not count its batches as the trial does: until the next epoch, what "
                "depends on that count, such as a learning rate, is not what the script means. Count with "
                "dist_core.progress_step(batch_size), or in a variable that is set before the loop over epochs"
            )

    @staticmethod
    def _warn_of_sum(core: Replica) -> None:
        """Warn of a sum over this replica's samples that the script may take for one over all samples."""
        num_replicas = core.generation.group.num_replicas
        if num_replicas == 1 or puts_together(core):
            return
        name = sum_over_uncounted_samples()
        if name is not None:
            core.warn(
                f"the training loop adds up in {name!r} what its samples give and does not count them: on "
                f"{num_replicas} replicas that is the sum over one replica's samples, about 1/{num_replicas} of all. "
                "Divide it by a count of the samples that the loop has seen, or add it up in an Accumulator"
            )

    def _leave_out_first(self, core: Replica) -> None:
        """Leave out the epoch's first samples, unless the trial is resumed or joined behind them."""
        left_out, self._marks.left_out = self._marks.left_out, 0
        cursor, size = self._loader.cursor, self._loader.epoch_size
        has_begun = size is None or core.position.epoch_progress > core.position.epoch * size
        if not left_out or has_begun or cursor.position:
            return
        core.position.leave_out(left_out)
        samples = self._loader.source.num_samples
        if samples is not None and left_out < samples:
            cursor.position = left_out
        else:
            cursor.end_pass()

    def _train_steps(self, core: Replica, started_passes: int, steps_before: int) -> Generator[Any, None, bool]:
        """Yield the loop's steps; return False if the epoch ended in its middle, as an iterator still held allows."""
        run = core.position.runs
        times = StepTimes(core)
        while not self._is_over(core, started_passes):
            for step in self._steps_under_present_plan(core, started_passes):
                times.begin_step()
                self._marks.loaded = step
                core.sums.mark()
                core.script_habits.step_begins()
                for index, batch in enumerate(step.batches):
                    if index > 0:
                        core.script_habits.pass_begins()
                    for model in core.models:
                        model.passes.begin(step.plan, index, measures=step.measures)
                    for count in self._counts:
                        count.bodies += 1
                    core.habits.note_pass(
                        len(step.plan.micro_batches[index]), passes=len(step.batches), batch=step.plan.global_batch
                    )
                    self._marks.open = step.plan if index == len(step.batches) - 1 else None
                    try:
                        yield batch
                    except GeneratorExit:
                        # Held by what has ended, and let go of when the code runs again or the process ends, it has
                        # nothing to say.
                        if core.position.runs == run and not sys.is_finalizing():
                            self._leave_early(core, step.plan, core.position.steps > steps_before)
                        raise
                    is_first = core.position.steps == steps_before and index == 0
                    # The batches of a step of several passes are held here until it is over.
                    core.habits.note_batch(
                        batch if len(step.batches) == 1 else None, is_first=is_first, is_trained=_is_trained(core)
                    )
                    times.end_pass(step.plan, index)
                if self._marks.open is None:
                    # It has counted the step.
                    return False
                self._marks.open = None
                if core.pacing.loader is self._loader:
                    times.note(step.plan, measures=step.measures)
                self._finish(core, step.plan)
        return True

    @property
    def _counts(self) -> tuple[BodyCount, BodyCount]:
        return self._marks.in_loop, self._marks.in_all

    def _finish(self, core: Replica, step: StepPlan) -> bool:
        """Finish a step; tell whether it counts on all replicas."""
        position, steps_so_far, before = core.position, core.position.steps, core.position.progress
        core.steps.finish(self._loader, step.global_batch)
        progress, passes = position.progress - before, len(step.micro_batches)
        is_counted = position.steps > steps_so_far
        assert core.adaptation is not None
        # A second loop within an epoch makes no progress.
        worth = progress / min(step.global_batch, core.adaptation.bounds.init_batch) if progress else passes
        for count in self._counts:
            if is_counted:
                count.worth += worth
            else:
                count.uncounted += passes
        return is_counted

    def _leave_early(self, core: Replica, step: StepPlan, has_trained: bool) -> None:
        """Leave the loop that the user broke out of: a step that was applied counts.

        The next loop begins a new pass, as it does with torch's loader.
        """
        self._marks.open = None
        if step is self._marks.completed:
            return
        # One that a replica was lost in has not stepped.
        passed = any(model.step_place.passed_step for model in core.models)
        lost = passed and (core.broken is not None or core.shared_step.is_left_out)
        stepped = lost or any(model.step_place.stepped for model in core.models)
        is_counted = True
        core.loops.leave_early(self._loader, has_trained=has_trained or stepped)
        self._loader.cursor.left |= has_trained or stepped
        try:
            if stepped:
                is_counted = self._finish(core, step)
            else:
                core.record.step_is_left()
            core.rollback.begin_between_loops()
        except BaseException as error:
            core.leaving.postpone(error)
        finally:
            for model in core.models:
                model.passes.leave()
        marks, bodies = self._marks, self._marks.in_loop.bodies
        start = core.position.loop_start
        is_left = bool(self._loader.cursor.position) or (start is not None and self._loader.cursor.passes == start[1])
        # Who looks at one more batch than it trains on does not count them.
        left_by_count = stepped and bodies == marks.promised and self._loader.cursor.left and is_left
        if left_by_count and marks.in_loop.uncounted and marks.may_be_counted:
            # Whoever counts batches leaves before all samples were trained.
            if core.environment is None:
                # Alone, nobody runs the script again.
                core.warn(_LEFT_BY_COUNT.format(bodies))
            core.leaving.postpone(RunAgain(in_loop=True))
        elif not is_counted:
            core.warn("the training loop was left at a step in which a replica was lost: that step does not count")
        elif left_by_count:
            core.warn(_LEFT_BY_COUNT.format(bodies))
        elif core.pacing.loader is self._loader:
            self._warn_of_own_count(core)

    def _warn_of_own_count(self, core: Replica) -> None:
        """Warn of a loop that was left by a count of its batches, which are not the script's."""
        if any(model.step_place.is_asked_for for model in core.models):
            # It counts steps and not bodies.
            return
        for count in self._counts:
            bodies = count.bodies - count.uncounted
            # The last one may have been looked at only.
            if bodies - 1 - _MOST_OFF * bodies <= count.worth <= (1 + _MOST_OFF) * bodies:
                continue
            found = count_that_decides({bodies, bodies - 1})
            if found is not None and core.generation.group.rank == 0:
                core.warn(
                    f"the training loop was left where {found[0]!r}, its count of batches, is {found[1]}, but they "
                    f"are worth {count.worth:.0f} of the script's: a step may come in several passes, and counts for "
                    "more with a larger batch. Count with dist_core.progress_step(batch_size)"
                )
                return

    def complete_step(self, core: Replica) -> None:
        """Count the last step of an epoch that ends while an iterator over this loader is still held."""
        step = self._marks.open
        if step is not None:
            self._leave_early(core, step, has_trained=True)
            self._marks.completed = step
            core.raise_postponed()

    def _steps_under_present_plan(self, core: Replica, started_passes: int) -> Iterator[LoadedStep]:
        """Load steps ahead until something changes: generation, batch size, end of the epoch."""
        key = self._plan_key(core)
        self._marks.division = self._present_division(core)
        with _drawing_alike(core):
            steps = self._loader.source.steps(self._marks.division)
        while self._plan_key(core) == key and not self._is_over(core, started_passes):
            began = self._loader.cursor.passes
            with _drawing_alike(core):
                step = next(steps, None)
            if step is None:
                return
            yield step
            if self._loader.cursor.passes != began and not self._loader.bounds.adaptive:
                return

    def _plan_key(self, core: Replica) -> tuple[int, ...]:
        assert core.adaptation is not None
        adaptation = core.adaptation
        return (
            core.generation.number,
            core.generation.group.world_size,
            adaptation.atomic_batch,
            adaptation.accumulation,
            int(core.habits.trains_in_turns),
        )

    def _present_division(self, core: Replica) -> Division:
        assert core.adaptation is not None
        adaptive = core.pacing.loader is self._loader and self._loader.bounds.adaptive
        return Division(
            rank=core.generation.group.share,
            world_size=core.generation.group.num_shares,
            global_batch=self._loader.current_batch_size,
            accumulation=core.adaptation.accumulation if core.pacing.loader is self._loader else 0,
            first_step=core.position.steps,
            measures=functools.partial(core.models.measures, num_replicas=core.generation.group.num_replicas),
            splits_measured=core.generation.group.num_replicas == 1 and adaptive and not core.habits.trains_in_turns,
            splits_first=fixed_choice(core.adaptation.bounds, core.generation.group.num_shares)[1] > 0,
            varies=adaptive,
            drop_last=self._loader.drop_last and not adaptive,
            stream_workers=core.habits.stream_workers or 1,
            least=core.models.least_samples,
            note_round=core.record.note_meeting,
            agree=core.rendezvous.sum_between_steps,
        )

    # ------------------------------------------------------------------ where it ends

    @property
    def _has_no_batch(self) -> bool:
        """Tell whether a pass has fewer samples than the batch, and what does not fill a batch is left out."""
        loader = self._loader
        samples = loader.source.num_samples
        return bool(loader.drop_last and not loader.bounds.adaptive and samples and samples < loader.batch_size)

    def _is_over(self, core: Replica, started_passes: int) -> bool:
        """Tell whether this loop ends here: an epoch's progress is made by the first loop of the first loader."""
        if not (self._ends_by_progress(core) and core.position.in_epoch_loop and core.position.is_first_loop):
            return bool(self._loader.cursor.passes > started_passes)
        return self._has_progressed(core)

    def _ends_by_progress(self, core: Replica) -> bool:
        """Tell whether this loader's first loop of an epoch ends with the epoch's progress, and not with a pass."""
        return (
            core.pacing.loader is self._loader
            and self._loader.epoch_size is not None
            and (self._loader.bounds.adaptive or not self._loader.drop_last)
        )

    def _has_progressed(self, core: Replica) -> bool:
        assert self._loader.epoch_size is not None
        target = (core.position.epoch + 1) * self._loader.epoch_size
        return core.position.epoch_progress >= target * (1 - _PROGRESS_TOLERANCE)

    # ------------------------------------------------------------------ passes that do not count

    def _dry_steps(self, core: Replica) -> Iterator[Any]:
        """Yield passes of a joiner that is still alone; what they change is overwritten when it joins."""
        number, seen = self._dry_samples(core), 0
        for _ in range(MOST_DRY_BATCHES):
            if not core.generation.dry_steps_left:
                break
            core.generation.begin_dry_pass()
            core.habits.note_pass(number, passes=1, batch=self._loader.current_batch_size)
            for model in core.models:
                model.passes.begin_dry()
            try:
                yield from self._loader.source.first_samples(number, behind=seen)
            finally:
                # A batch that was only looked at built no bucket, nor did one whose gradient is summed up for later.
                built = any(model.passes.took_gradients for model in core.models)
                core.generation.end_dry_pass(built=built)
                # One that the script leaves out, it would leave out again.
                seen += 0 if built else number
        core.generation.set_dry_passes(0)
        for model in core.models:
            model.passes.end_dry()

    def _once_more(self, core: Replica) -> Iterator[Any]:
        """Run the body of a completed loop once more, for what the code after it needs; it changes nothing."""
        undo, run = core.rollback.remember(), core.position.runs
        core.generation.set_dry_passes(1)
        core.loops.replaying = True
        for model in core.models:
            model.passes.begin_dry()
        try:
            yield from self._loader.source.first_samples(self._dry_samples(core))
        finally:
            if core.position.runs == run:
                core.generation.set_dry_passes(0)
                core.loops.replaying = False
                for model in core.models:
                    model.passes.end_dry()
                undo()

    def _dry_samples(self, core: Replica) -> int:
        return max(2, min(self._loader.batch_size, 32, core.memory_limit.most_examples or 32))

    def _passes_before(self, core: Replica) -> int | None:
        """Return the number of passes over the data before the present loop, if the trial was resumed within it."""
        if core.position.is_resumed and not core.generation.joining:
            return self._passes_at_start_of(core, core.position.loops_begun + 1)
        return None

    def _passes_at_start_of(self, core: Replica, loop: int) -> int | None:
        """Return the number of passes over the data before that loop of the epoch, if it is the trial's latest."""
        if core.position.loop_start is not None:
            number, passes = core.position.loop_start
            if number == loop:
                return passes
        return None

    def _was_completed(self, core: Replica, started_passes: int | None) -> bool:
        """Tell whether the loop that begins has nothing left: the trial was resumed behind it, in the same epoch."""
        if not core.position.is_resumed or core.generation.joining:
            return False
        if core.position.loops_begun < core.position.loops_done:
            return True
        if self._ends_by_progress(core) and core.position.loops_begun == 0:
            return self._has_progressed(core)
        return started_passes is not None and bool(self._loader.cursor.passes > started_passes)


def _drawing_alike(core: Replica) -> AbstractContextManager[None]:
    """Have processes that compute one share together draw the same for its samples, which each loads for itself."""
    group = core.generation.group
    if group.slots_per_share == 1:
        return nullcontext()
    return seeded(
        derived_seed("samples", core.model_parallel.agreed(core.random.seed), group.share, core.position.steps)
    )


def _refuse_outside_of_epochs(core: Replica) -> None:
    if core.position.in_epoch_loop:
        return
    if core.environment is not None:
        purpose = "the trial can be rescaled"
    elif core.states.folder is not None:
        purpose = f"it can go on from the checkpoints in {core.states.folder}"
    else:
        return
    raise InvalidTraining(
        "a training loop over AdaptiveDataLoader runs outside remaining_epochs_until(); write "
        f"`for epoch in remaining_epochs_until(num_epochs):` around it so that {purpose}"
    )
