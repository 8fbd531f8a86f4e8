"""What a user asks of the scheduler for a study: its share, its place among others, what its slots are to achieve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trials.errors import InvalidStudyTerms

Goal = Literal["completion_time", "time_to_best", "fairness", "makespan", "deadline", "budget"]
GOALS: tuple[Goal, ...] = get_args(Goal)
LARGEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTerms:
    """Raises InvalidStudyTerms for a value that means nothing."""

    weight: float = 1.0
    """Share of the slots relative to other studies, where there are not enough."""
    priority: int = 0
    """Trials of studies with a higher one come first."""
    yields_to: tuple[str, ...] = ()
    """Studies that come first whatever their priority."""
    quota: int | None = None
    """Most slots at once."""
    goal: Goal = "completion_time"
    deadline_at: float | None = None
    """When the study's best result is wanted (seconds since the epoch); for the goal ``deadline``."""
    budget_slot_hours: float | None = None
    """Slot-hours that the study may use in all; for the goal ``budget``."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidStudyTerms(f"weight is {self.weight}; it must be above 0")
        if abs(self.priority) > LARGEST_PRIORITY:
            raise InvalidStudyTerms(f"priority is {self.priority}; it must be between -1000 and 1000")
        if self.quota is not None and self.quota < 1:
            raise InvalidStudyTerms(f"quota is {self.quota}; it must be at least 1 slot, or none at all")
        if self.goal not in GOALS:
            raise InvalidStudyTerms(f"goal is {self.goal!r}; choose one of {', '.join(GOALS)}")
        if self.deadline_at is not None and not math.isfinite(self.deadline_at):
            raise InvalidStudyTerms(f"deadline is {self.deadline_at}; it must be a time")
        if self.goal == "deadline" and self.deadline_at is None:
            raise InvalidStudyTerms("the goal 'deadline' needs a deadline")
        if self.budget_slot_hours is not None and not self.budget_slot_hours > 0:
            raise InvalidStudyTerms(f"budget is {self.budget_slot_hours} slot-hours; it must be above 0")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "yields_to": list(self.yields_to)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StudyTerms:
        return cls(**{**document, "yields_to": tuple(document.get("yields_to", ()))})
