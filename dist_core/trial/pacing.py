"""Pacing: which loader drives a trial's batch size and progress."""

from __future__ import annotations

from typing import Any

from dist_core.state.position import Position
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.participants import PacingLoader


class Pacing:
    def __init__(self, position: Position, batch: BatchAgreement, habits: LoopHabits) -> None:
        self._position = position
        self._batch = batch
        self._habits = habits
        self.loader: PacingLoader | None = None
        """None until one trains."""

    def forget(self) -> None:
        """The user's code begins again from its top."""
        self.loader = None

    @property
    def epoch_size(self) -> int | None:
        return None if self.loader is None else self.loader.epoch_size

    @property
    def order_fingerprint(self) -> int:
        return 0 if self.loader is None else self.loader.order_fingerprint

    def adopt(self, loader: PacingLoader) -> None:
        """The first loader that trains drives batch size and progress.

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

    def paces(self, loader: PacingLoader) -> bool:
        """Tell whether this loader's steps are progress: an epoch that passes over its data twice is not two."""
        return loader is self.loader and (self._position.is_first_loop or not self._position.in_epoch_loop)


class LoopHabits:
    def __init__(self) -> None:
        self.trains_in_turns = False
        """True if the loop's body computes further gradients after an optimizer has stepped, as for a GAN."""
        self.stream_workers: int | None = None
        """Workers of the first loader that divides its stream, on the replica that was rank 0 then."""

    def note_stream_workers(self, number: int) -> None:
        """A stream is divided by its loader's workers, which may be more on one machine than on another."""
        if self.stream_workers is None:
            self.stream_workers = number

    def state_dict(self) -> dict[str, Any]:
        return {"trains_in_turns": self.trains_in_turns, "stream_workers": self.stream_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trains_in_turns = state["trains_in_turns"]
        self.stream_workers = state.get("stream_workers") or self.stream_workers
