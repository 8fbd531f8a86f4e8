"""Changes of a job's number of slots, and which of them were taken back before they had paid for their pause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """``goodput``: before it, in any unit that is the same for all changes of a job."""

    at: float
    before: int
    after: int
    goodput: float
    pause_seconds: float

    def is_undone_by(self, slots: int, goodput: float, now: float) -> bool:
        """Whether a change to so many slots takes this one back before it has paid for its pause.

        ``goodput``: after this change. What is gained with more slots, for this trial or by giving them to others,
        makes up for what the pause has cost after pause * larger / (larger - smaller).
        """
        back = slots <= self.before if self.after > self.before else slots >= self.before
        smaller, larger = sorted((self.goodput, goodput))
        return back and (larger <= smaller or now - self.at < self.pause_seconds * larger / (larger - smaller))
