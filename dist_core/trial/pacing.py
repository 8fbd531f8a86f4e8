"""Pacing: the loader that drives a trial's batch size and progress, and the hints that the scheduler gets of it."""

from __future__ import annotations

from typing import Any

from dist_core.data.batch_size import Adaptation
from dist_core.generations.generation import Generation
from dist_core.goodput import Hints
from dist_core.life import Listener
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.models import Models
from dist_core.trial.participants import PacingLoader


class Pacing(Listener):
    def __init__(self, position: Position, batch: BatchAgreement, habits: LoopHabits) -> None:
        self._position = position
        self._batch = batch
        self._habits = habits
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
        if self._habits.trains_in_turns:
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
        return self._habits.trains_in_turns

    def train_in_turns(self) -> None:
        """Make steps of one pass: the loop's body computes further gradients after an optimizer has stepped."""
        self._habits.trains_in_turns = True
        self._batch.forbid_accumulation()


class LoopHabits:
    def __init__(self) -> None:
        self.trains_in_turns = False
        """True if the loop's body computes further gradients after an optimizer has stepped, as for a GAN."""
        self.stream_workers: int | None = None
        """Workers of the first loader that divides its stream, on the replica that was rank 0 then."""

    def note_stream_workers(self, number: int) -> None:
        """Note a stream's workers, by which it is divided; one machine may have more than another."""
        if self.stream_workers is None:
            self.stream_workers = number

    def state_dict(self) -> dict[str, Any]:
        return {"trains_in_turns": self.trains_in_turns, "stream_workers": self.stream_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trains_in_turns = state["trains_in_turns"]
        self.stream_workers = state.get("stream_workers") or self.stream_workers


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
        if self._generation.group.rank == 0:
            self._news.hint(self.compose, self._generation.number)

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
