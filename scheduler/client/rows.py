"""Trials, studies and nodes as a scheduler tells them, as plain objects. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from trials.record import WaitingJob

FINAL = frozenset({"succeeded", "pruned", "cancelled", "failed"})
WAITING = frozenset({"pending", "paused"})
Row = TypeVar("Row")


def row_of(kind: type[Row], fields: Mapping[str, Any]) -> Row:
    """Make a row of the fields that this version knows; a newer scheduler may tell more."""
    names = _names(kind)  # type: ignore[arg-type]  # classes are hashable
    if fields.keys() <= names:
        return kind(**fields)
    return kind(**{name: value for name, value in fields.items() if name in names})


@cache
def _names(kind: type[Any]) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial's row in listings: its names, state with reason, slots and latest report."""

    id: str
    study: str
    """Its name among all studies of the scheduler."""
    number: int
    title: str = ""
    """Name of the study for people."""
    state: str
    code: str
    """Code of the reason, for programs."""
    why: str
    replicas: int
    min: int
    max: int
    size: int = 1
    """Slots of a replica."""
    submitted: float
    finished: float | None = None
    layout: str = ""
    losses: int = 0
    parent: str = ""
    """Id of the trial whose state it began with."""
    held: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    latest: float | None = None
    """The value reported at that step."""
    progress: float | None = None
    value: float | list[float] | None = None
    """Value that it returned."""
    error: str | None = None
    slots: int = 0
    promise: float | None = None
    rank: str = ""
    batch: int | None = None
    goodput: float | None = None
    """Examples at the initial batch size a second."""
    epoch: int | None = None
    done: float | None = None
    """Part of its declared length."""
    rate: float | None = None
    """The learning rate."""
    expected: float | None = None
    """Time at which it is expected to start."""
    slot_hours: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in FINAL

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def label(self) -> str:
        """Return the trial's name with its study, such as ``alpha/0``."""
        return f"{self.title or self.study}/{self.number}"

    @property
    def score(self) -> float | None:
        """Return its value, or its latest report; of several objectives the first."""
        found = self.latest if self.value is None else self.value
        return found[0] if isinstance(found, list) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study, what is asked for it, and what it has used."""

    name: str
    title: str
    direction: str
    user: str = ""
    driven: bool = False
    """Its sweep runs."""
    weight: float = 1.0
    priority: int = 0
    yields_to: list[str] = field(default_factory=list)
    quota: int | None = None
    goal: str = "completion_time"
    deadline_at: float | None = None
    budget_slot_hours: float | None = None
    trials: int = 0
    over: int = 0
    slots: int = 0
    """Held now."""
    slot_hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine, and how many of its slots are in use."""

    name: str
    slots: int
    kind: str = ""
    reserved_for: list[str] = field(default_factory=list)
    given_by: str = ""
    """Job of a queue that the node came with."""
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Queue of jobs that slots come with, where a queue gives them."""

    jobs: list[WaitingJob] = field(default_factory=list)
    trouble: str = ""
    """Why no more of them are asked for."""
    held_hours: float | None = None
    """Slot hours that they have been there for, used or not; None where there is no queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedHours:
    """Hours that one study used on one day."""

    study: str
    title: str
    user: str
    day: str
    hours: float
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something that happened to a trial."""

    at: float
    what: str
    code: str
    why: str
    who: str
    trial: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
