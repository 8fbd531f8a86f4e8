"""Pacing: the loader that drives a trial's batch size and progress, and the hints that the scheduler gets of it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from dist_core.data.batch_size import Adaptation
from dist_core.errors import UNDIVIDED, InvalidTraining
from dist_core.generations.generation import Generation
from dist_core.goodput import Hints
from dist_core.life import Listener
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.torch_private import tensors_in
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.models import Models
from dist_core.trial.participants import PacingLoader

_FETCHED_AHEAD = (
    "the training loop trains on a batch after it has fetched the next one, as prefetchers do and loops that count the "
    "tokens of several batches first. A batch counts as trained when the next one is asked for, so gradients would be "
    "weighed as those of another batch, and lost where the trial is rescaled. Train on each batch before you fetch the "
    "next: AdaptiveDataLoader itself loads ahead (num_workers=2, pin_memory=True), and loader.weigh() takes the number "
    "of a batch's tokens"
)


class Pacing(Listener):
    def __init__(self, position: Position, batch: BatchAgreement, habits: LoopHabits) -> None:
        self._position = position
        self._batch = batch
        self.habits = habits
        self.loader: PacingLoader | None = None
        """None until one trains."""
        self.awaits_loader = False
        """True once the code has made a loader."""

    def runs_again(self) -> None:
        self.loader = None

    @property
    def adaptation(self) -> Adaptation | None:
        """Return the choice of the batch size; None until a loader trains."""
        return self._batch.adaptation

    @property
    def epoch_size(self) -> int | None:
        return None if self.loader is None else self.loader.epoch_size

    @property
    def order_fingerprint(self) -> int:
        return 0 if self.loader is None else self.loader.order_fingerprint

    def adopt(self, loader: PacingLoader) -> None:
        """Let the first loader that trains drive batch size and progress.

        One that is made anew each epoch takes its predecessor's place.
        """
        if self.loader is None:
            self._begin_with(loader)
        elif self.loader is not loader and self._position.in_epoch_loop and self._position.loops_begun == 0:
            loader.take_over(self.loader)
            self.loader = loader

    def _begin_with(self, loader: PacingLoader) -> None:
        self.loader = loader
        adaptation = self._batch.adopt(loader.bounds)
        if self.habits.trains_in_turns:
            adaptation.forbid_accumulation()
        self._batch.begin()

    def progress_of(self, loader: PacingLoader, samples: int) -> float:
        """Return what a step over so many of this loader's samples is worth, in samples at the initial batch size.

        An epoch that passes over its data twice is not two.
        """
        adaptation = self._batch.adaptation
        assert adaptation is not None
        paces = loader is self.loader and (self._position.is_first_loop or not self._position.in_epoch_loop)
        return adaptation.progress_of(samples) if paces else 0.0

    def complete_step(self) -> None:
        """Count a step whose iterator is still held as the epoch ends."""
        if self.loader is not None:
            self.loader.complete_step()

    # ------------------------------------------------------------------ models that train in turns

    @property
    def trains_in_turns(self) -> bool:
        return self.habits.trains_in_turns

    def train_in_turns(self, why: str, *, is_divided: bool) -> None:
        """Make steps of one pass from now on, because of a habit of the loop's body.

        Raises InvalidTraining if the present step is divided already; ``why``: its words, up to "Train each batch".
        """
        if is_divided:
            raise InvalidTraining(f"{why} {UNDIVIDED}")
        if not self.habits.trains_in_turns:
            self.habits.trains_in_turns = True
            self._batch.forbid_accumulation()


class LoopHabits:
    def __init__(self) -> None:
        self._untrained: list[weakref.ref[torch.Tensor]] = []
        """Tensors of the latest batch, if no model has computed gradients of it before the next one was asked for."""
        self._skipped_first = False
        """True if the present loop's first batch was one of these."""
        self._rows: tuple[int, int] | None = None
        """Samples of the batch before and of the present one, on this replica."""
        self._batch = 0
        """Samples of the present step's batch, on all replicas."""
        self._passes = 0
        """Passes of the present step; 0 behind a loop."""
        self.trains_in_turns = False
        """True if the loop's body computes further gradients after an optimizer has stepped, as for a GAN."""
        self.stream_workers: int | None = None
        """Workers of the first loader that divides its stream, on the replica that was rank 0 then."""

    def note_pass(self, rows: int, *, passes: int, batch: int) -> None:
        """Note the samples that the loop's body is given, in one of so many passes, of those of the whole batch."""
        self._rows, self._passes, self._batch = (rows if self._rows is None else self._rows[1], rows), passes, batch

    def loop_ran_out(self) -> None:
        self._passes = 0

    def notes(self, error: BaseException) -> list[str]:
        """Return what a loop's body that raised this error may have stumbled over."""
        notes = []
        if isinstance(error, StopIteration):
            notes.append(
                "elastune: if this is an iterator over the loader, it had no more batches: a trial that is resumed, or "
                "joined, within an epoch has those that are left, whatever len(loader) was. Write 'for batch in loader'"
            )
        if self._passes and self._rows is not None and _names_both(str(error), self._batch, self._rows[1]):
            notes.append(
                f"elastune: this pass has {self._rows[1]} of the batch's {self._batch} samples, the others are other "
                "replicas' or passes'. Code that writes the batch size down has to ask the batch for it: len(x)"
            )
        if self._passes > 1:
            notes.append(
                "elastune: this step takes several passes, each a part of the batch. Gradients are None until the last "
                "pass, in which they are the whole batch's. Code that needs them in each pass has to train each batch "
                f"{UNDIVIDED}"
            )
        if self._passes and self._rows is not None and self._rows[0] != self._rows[1]:
            notes.append(
                f"elastune: this replica's part of the batch has {self._rows[1]} samples, and that of the batch before "
                f"had {self._rows[0]}: it changes with the number of replicas and with the batch size. Code that "
                "carries tensors of a batch's size from one batch to the next has to stay at one size: give the trial "
                "min_replicas=max_replicas, and drop_last=True"
            )
        return notes

    def note_batch(self, batch: Any, *, is_first: bool, is_trained: bool) -> None:
        """Note what the loop's body has done with a batch, now that it asks for the next one."""
        self._untrained = [] if is_trained else [weakref.ref(each) for each in tensors_in(batch)]
        if is_first:
            self._skipped_first = not is_trained

    def refuse_batch_fetched_ahead(self, inputs: Any) -> None:
        """Raise InvalidTraining if the forward pass that begins is of a batch before the one handed out last."""
        waiting = [tensor for each in self._untrained if (tensor := each()) is not None]
        if waiting and _places(waiting) & _places(tensors_in(inputs)):
            raise InvalidTraining(_FETCHED_AHEAD)

    def refuse_batch_behind_loop(self) -> None:
        """Raise InvalidTraining if the loop's last batch comes behind it, as its first one came a batch too late."""
        if self._skipped_first:
            raise InvalidTraining(_FETCHED_AHEAD)

    def note_stream_workers(self, number: int) -> None:
        """Note a stream's workers, by which it is divided; one machine may have more than another."""
        if self.stream_workers is None:
            self.stream_workers = number

    def state_dict(self) -> dict[str, Any]:
        return {"trains_in_turns": self.trains_in_turns, "stream_workers": self.stream_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trains_in_turns = state["trains_in_turns"]
        self.stream_workers = state.get("stream_workers") or self.stream_workers


def _names_both(words: str, whole: int, part: int) -> bool:
    """Tell whether these words have two numbers that are to each other as the whole batch is to this part of it."""
    numbers = {int(number) for number in re.findall(r"\d{1,9}", words)}
    return part < whole and any(
        number % whole == 0 and number // whole * part in numbers for number in numbers if number >= whole
    )


def _places(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return where the tensors lie in memory."""
    return {each.data_ptr() for each in tensors if each.layout is torch.strided and each.numel()}


class Hinting(Listener):
    def __init__(
        self,
        generation: Generation,
        position: Position,
        models: Models,
        pacing: Pacing,
        layout: ChosenLayout,
        news: News,
    ) -> None:
        self._generation = generation
        self._position = position
        self._models = models
        self._pacing = pacing
        self._layout = layout
        self._news = news

    def step_ended(self) -> None:
        self._hint()

    def epochs_ended(self) -> None:
        self._hint(is_last=True)

    def _hint(self, *, is_last: bool = False) -> None:
        if self._generation.joined and self._generation.group.rank == 0:
            self._news.hint(self.compose, self._generation.number, is_last=is_last)

    def compose(self) -> Hints | None:
        """Return the trial's present hints; None before a loader trains."""
        adaptation = self._pacing.adaptation
        if adaptation is None or self._pacing.loader is None:
            return None
        per_epoch, limit = self._pacing.epoch_size, self._position.limit
        fraction = self._position.fraction_of_epoch(per_epoch)
        return Hints(
            bounds=adaptation.bounds,
            observations=tuple(adaptation.profile.observations()),
            statistics=self._models.statistics,
            progress=self._position.progress,
            target_progress=None if limit is None or per_epoch is None else float(limit * per_epoch),
            epoch=self._position.epoch,
            epoch_fraction=fraction,
            epoch_seconds=self._news.typical_epoch_seconds(fraction),
            global_batch=adaptation.global_batch(self._generation.group.num_shares),
            goodput=adaptation.measured_goodput,
            rescale_pause_seconds=self._news.typical_pause,
            last_pause_seconds=self._news.pauses[-1] if self._news.pauses else None,
            slots_per_share=self._generation.group.slots_per_share,
            layout=self._layout.name,
            layouts=self._layout.terms,
            slot_memory_bytes=self._layout.slot_memory,
            learning_rate=self._models.learning_rate,
        )
