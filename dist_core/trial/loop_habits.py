"""LoopHabits: what a trial's training code was seen to do, which every replica of it has to know."""

from __future__ import annotations

from typing import Any


class LoopHabits:
    def __init__(self) -> None:
        self.trains_in_turns = False
        """Whether the loop's body computes further gradients after an optimizer has stepped, as for a GAN."""
        self.stream_workers: int | None = None
        """Of the first loader that divides its stream, on the replica that was rank 0 then."""

    def note_stream_workers(self, number: int) -> None:
        """A stream is divided by its loader's workers, which may be more on one machine than on another."""
        if self.stream_workers is None:
            self.stream_workers = number

    def state_dict(self) -> dict[str, Any]:
        return {"trains_in_turns": self.trains_in_turns, "stream_workers": self.stream_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trains_in_turns = state["trains_in_turns"]
        self.stream_workers = state.get("stream_workers") or self.stream_workers
