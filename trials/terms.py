"""Terms of a user for a study: its share, its place among others, what its slots are to achieve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trials.checks import are_texts, is_integer, is_number
from trials.errors import InvalidStudyTerms

Goal = Literal["completion_time", "time_to_best", "fairness", "makespan", "deadline", "budget"]
GOALS: tuple[Goal, ...] = get_args(Goal)
LARGEST_PRIORITY = 1000
LARGEST_WEIGHT = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTerms:
    """Share, priority and goal of a study, as its user asks for them.

    Raises InvalidStudyTerms for a value that means nothing.
    """

    weight: float = 1.0
    """Share of the slots relative to other studies, where there are not enough."""
    priority: int = 0
    """Trials of studies with a higher one come first."""
    yields_to: tuple[str, ...] = ()
    """Studies that come first whatever their priority."""
    quota: int | None = None
    """Most slots at once."""
    goal: Goal = "completion_time"
    """Goal of the study's slots. The default loses nothing of the best score; ``time_to_best`` finds the best sooner
    and finishes half as many trials, at 1.3% of the score (docs/scheduling.md)."""
    deadline_at: float | None = None
    """Time at which the best result is wanted (seconds since the epoch); for the goal ``deadline``."""
    budget_slot_hours: float | None = None
    """Slot-hours that the study may use in all; for the goal ``budget``."""

    def __post_init__(self) -> None:
        if not is_number(self.weight) or not 1.0 / LARGEST_WEIGHT <= self.weight <= LARGEST_WEIGHT:
            raise InvalidStudyTerms(
                f"weight is {self.weight!r:.80}; it must be from {1 / LARGEST_WEIGHT:.0e} to {LARGEST_WEIGHT:.0e}"
            )
        if not is_integer(self.priority) or abs(self.priority) > LARGEST_PRIORITY:
            raise InvalidStudyTerms(f"priority is {self.priority!r:.80}; it must be a whole number from -1000 to 1000")
        if not are_texts(self.yields_to):
            raise InvalidStudyTerms(f"yields_to is {self.yields_to!r:.80}; it must be a list of study names")
        if self.quota is not None and (not is_integer(self.quota) or self.quota < 1):
            raise InvalidStudyTerms(
                f"quota is {self.quota!r:.80}; it must be a whole number of at least 1, or left out for no limit"
            )
        if self.goal not in GOALS:
            raise InvalidStudyTerms(f"goal is {self.goal!r}; choose one of {', '.join(GOALS)}")
        if self.deadline_at is not None and not is_number(self.deadline_at):
            raise InvalidStudyTerms(
                f"deadline is {self.deadline_at!r:.80}; it must be a Unix time, such as time.time() + 3600"
            )
        if self.goal == "deadline" and self.deadline_at is None:
            raise InvalidStudyTerms(
                "the goal 'deadline' needs a deadline: deadline_at, or `elastune set STUDY --deadline-in MINUTES`"
            )
        budget = self.budget_slot_hours
        if budget is not None and (not is_number(budget) or not budget > 0):
            raise InvalidStudyTerms(f"budget is {budget!r:.80} slot-hours; it must be a number above 0")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "yields_to": list(self.yields_to)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StudyTerms:
        names = document.get("yields_to", ())
        return cls(**{**document, "yields_to": tuple(names) if isinstance(names, list) else names})
