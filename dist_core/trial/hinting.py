"""Hinting: what rank 0 tells the scheduler of how training goes."""

from __future__ import annotations

from dist_core.generations.generation import Generation
from dist_core.goodput import Hints
from dist_core.life import Listener
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing


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
