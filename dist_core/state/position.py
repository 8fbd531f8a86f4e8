"""Position of a training: epochs and their loops, steps, and the progress that they have made."""

from __future__ import annotations

from typing import Any


class Position:
    """Position of the trial, as this process sees it: the trial's part is in its checkpoints, and goes to joiners."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """Epochs in all, once the code has said so."""
        self.runs = -1
        """Times that the user's code has begun again from its top."""
        self.begin_run()

    # ------------------------------------------------------------------ what moves it: nobody else writes it

    def begin_run(self) -> None:
        """Reset the position: the code begins from its top, and nothing of an earlier run is settled."""
        self.runs += 1
        self.epoch = self.steps = 0
        self.progress = self.progress_shift = self.schedule_position = 0.0
        self.limit = None
        self.own_steps = 0
        """Made by this process since its code began."""
        self.steps_with_gradients = 0
        """Own steps in which this process came through a backward pass."""
        self.awaits_update = False
        """The latest step's gradients wait for those of later batches, which the script adds to them."""
        self.loops_begun = self.loops_done = 0
        """Training loops of the present epoch that this process has entered, and that the trial has completed."""
        self.loop_start: tuple[int, int] | None = None
        """Number of the latest training loop of the epoch, and the passes over its data before it."""
        self.done_before_leaving: int | None = None
        """Loops that were completed before the one that was left before its end, until another begins."""
        self.in_epoch_loop = self.in_training_loop = False
        self.has_evaluated = False
        """True once an evaluation has begun since the present epoch's last training loop."""

    def note_limit(self, epochs: int) -> None:
        self.limit = epochs

    def come_to_epoch(self, epoch: int) -> None:
        """Set a joiner's position to the beginning of the epoch that its trial trains."""
        self.epoch = epoch

    def enter_epochs(self) -> None:
        self.in_epoch_loop = True

    def leave_epochs(self) -> None:
        self.in_epoch_loop = False

    def step_done(self, *, progress: float, moves: float, took_gradients: bool, awaits_update: bool = False) -> None:
        """Count a step.

        ``progress``: samples at the initial batch size that it is worth; ``moves``: the schedule's. ``took_gradients``:
        this process came through a backward pass. ``awaits_update``: its gradients wait for those of later batches.
        """
        self.awaits_update = awaits_update
        self.progress += progress
        self.schedule_position += moves
        self.steps += 1
        self.own_steps += 1
        self.steps_with_gradients += took_gradients

    def leave_out(self, samples: int) -> None:
        """Begin the epoch behind so many samples, which an earlier run of the script has trained."""
        self.progress += samples

    def stand_at(self, *, epoch: int, steps: int, progress: float) -> None:
        """Go on from a file of a trainer's own, of which the trial has no checkpoint."""
        self.epoch, self.steps, self.schedule_position = epoch, steps, float(steps)
        self.progress = progress

    def evaluation_begins(self) -> None:
        self.has_evaluated |= not self.in_training_loop

    def take_evaluation(self, *, as_made: bool) -> None:
        """Set whether the code behind the epoch's last training loop has evaluated, as far as a resume is concerned."""
        self.has_evaluated = as_made

    # ------------------------------------------------------------------ what follows from it

    @property
    def epoch_progress(self) -> float:
        """Progress as if every epoch so far had been trained to its end."""
        return self.progress + self.progress_shift

    def in_epochs(self, epoch_size: int | None) -> float:
        """Epochs and parts of the present one; ``epoch_size``: progress that makes one, None if nobody knows."""
        return float(self.epoch) if epoch_size is None else max(float(self.epoch), self.epoch_progress / epoch_size)

    def fraction_of_epoch(self, epoch_size: int | None) -> float:
        return 0.0 if epoch_size is None else min(1.0, max(0.0, self.epoch_progress / epoch_size - self.epoch))

    @property
    def is_past_the_end(self) -> bool:
        """Resuming after the last epoch would return without having evaluated anything."""
        return self.limit is not None and self.epoch >= self.limit

    @property
    def is_resumed(self) -> bool:
        """The trial has trained before, and this process has made no step of it yet."""
        return self.own_steps == 0 and self.steps > 0

    @property
    def is_first_loop(self) -> bool:
        return self.loops_begun == 1

    @property
    def is_behind_next_loop(self) -> bool:
        """Tell whether the trial was resumed within the training loop that this process comes to, or behind it."""
        begun = 0 if self.loop_start is None else self.loop_start[0]
        return self.is_resumed and max(begun, self.loops_done) > self.loops_begun

    # ------------------------------------------------------------------ its loops

    def begin_loop(self) -> bool:
        """Begin a training loop.

        Return False for one that the trial has completed in this epoch before it was resumed.
        """
        self.loops_begun += 1
        self.done_before_leaving = None
        self.in_training_loop = self.loops_begun > self.loops_done
        if self.in_training_loop:
            self.has_evaluated = False
        return self.in_training_loop

    def note_loop_start(self, passes: int) -> None:
        """Note that a loop begins; ``passes``: complete passes over its data before."""
        self.loop_start = (self.loops_begun, passes)

    def pass_over_loop(self) -> None:
        """Count a loop that the trial had completed before, and leave it at once."""
        self.loops_begun += 1
        self.leave_loop()

    def leave_loop(self) -> None:
        """End the loop on this replica: its samples are used up, or the user left it."""
        self.in_training_loop = False
        self.loops_done = max(self.loops_done, self.loops_begun)

    def leave_loop_early(self, *, has_trained: bool) -> None:
        """Note that the loop ended before its last batch, by ``break`` or by an exception.

        A loop in which nothing was trained was a look at the data, and none of the epoch's loops.
        """
        self.done_before_leaving = self.loops_done
        if has_trained:
            self.leave_loop()
        else:
            self.in_training_loop = False
            self.loops_begun -= 1

    def stay_out_of_loop(self) -> None:
        """Take a loop that was left as meant to be left: code goes on behind it."""
        self.done_before_leaving = None

    def go_back_into_loop(self) -> None:
        """Take a loop that was left as not over."""
        if self.done_before_leaving is not None:
            self.loops_done = self.done_before_leaving

    def epoch_done(self, epoch_size: int | None) -> None:
        """End an epoch of the trial; ``epoch_size`` as for ``in_epochs``."""
        # A loop that the user left early does not make the next epochs longer.
        self.progress_shift += max(0.0, (self.epoch + 1) * (epoch_size or 0) - self.epoch_progress)
        self.epoch += 1
        self.in_training_loop = False
        self.loops_begun = self.loops_done = 0
        self.loop_start = self.done_before_leaving = None

    # ------------------------------------------------------------------ the trial's part

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "progress": self.progress,
            "progress_shift": self.progress_shift,
            "schedule_position": self.schedule_position,
            "loops_done": self.loops_done,
            "loop_start": None if self.loop_start is None else list(self.loop_start),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.steps, self.progress = state["epoch"], state["steps"], state["progress"]
        self.progress_shift, self.schedule_position = state["progress_shift"], state["schedule_position"]
        self.loops_done = state["loops_done"]
        start = state.get("loop_start")
        self.loop_start = None if start is None else (start[0], start[1])
