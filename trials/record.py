"""Records of a trial and its replicas: the rows that the store keeps and the control loop reads."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dist_core.layout import Layout
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.terms import StudyTerms

TRIAL_ID = re.compile(r"\bt[0-9a-f]{10}\b")
"""A trial's id in a sentence, as stores that make ids themselves make them."""


class ReplicaState(enum.Enum):
    LAUNCHED = "launched"
    """Its process exists; the user's code is on its way to the first training step."""
    READY = "ready"
    """Stands at its first training step and waits to be let in."""
    ACTIVE = "active"
    """Member of the generation that trains."""
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is as it is: a code for programs, a sentence for people."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    name: str
    """Its own among all studies of a scheduler; two databases may hold studies of one title."""
    title: str = ""
    """Name for people, where that is another one; it may be shared."""
    direction: str = "minimize"
    """``minimize`` or ``maximize``: which reports are better."""
    terms: StudyTerms = field(default_factory=StudyTerms)
    owner_seen_at: float | None = None
    """Time of the driver's last question for news (seconds since the epoch); None without a driver."""
    owner: str | None = None
    user: str = ""
    """User who started it, by the name on the driver's machine; empty: nobody said."""

    @property
    def called(self) -> str:
        """Return the name that people mean it by, in terms, reservations and tokens."""
        return self.title or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a trial's code: exactly one of value, pruned, error."""

    kind: str
    """``value``, ``pruned`` or ``error``."""
    value: Any = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial as its store keeps it: the spec, what the control loop decided, and the facts that replicas told."""

    trial_id: str
    spec: TrialSpec
    state: TrialState = TrialState.PENDING
    reason: Reason = field(
        default_factory=lambda: Reason(code="submitted", sentence="waits for the scheduler's next decision")
    )
    submitted_at: float = 0.0
    finished_at: float | None = None
    generation: int = 0
    """Number of the generation that trains; 0 before the first."""
    members: tuple[str, ...] = ()
    """Replica ids by rank of the generation that trains."""
    published: int = 0
    """Number of the latest generation offered to the replicas; beyond ``generation`` while a switch is under way."""
    published_members: tuple[str, ...] = ()
    published_at: float = 0.0
    join_epoch: int | None = None
    entered: int = 0
    """Latest generation that rank 0 said it had entered."""
    abandoned: int = 0
    """Latest generation that rank 0 said it had given up."""
    rescaled_at: float = 0.0
    layout: str = ""
    """Layout in which its replicas hold the model (``dist_core.layout``), where that was chosen for it."""
    losses: int = 0
    """Times in a row that all its replicas were lost, without progress in between."""
    outcome: Outcome | None = None
    cancel_requested: str | None = None
    hold: str | None = None
    """Set while the trial must not hold slots although it is wanted, such as after its driver left."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that its tuner tries with it, as far as that was told: JSON by name."""

    @property
    def slots_per_replica(self) -> int:
        return Layout.from_name(self.layout).slots if self.layout else self.spec.sizes[0]

    @property
    def switching(self) -> bool:
        return self.published > self.generation

    def with_facts_of(self, present: TrialRecord) -> TrialRecord:
        """Return the record with the control loop's decisions and what others have written since it was read."""
        return replace(self, **{name: getattr(present, name) for name in FACTS})


FACTS = ("entered", "abandoned", "outcome", "cancel_requested", "hold", "parameters")
"""Fields of a trial that replicas and drivers write, each by a call of the store's own; the control loop reads them."""
AS_THEY_ARE = (
    "finished_at",
    "generation",
    "published",
    "published_at",
    "join_epoch",
    "entered",
    "abandoned",
    "rescaled_at",
    "layout",
    "losses",
    "hold",
)
"""Fields of a trial that whoever keeps one writes as they are: texts and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    replica_id: str
    trial_id: str
    node: str
    slot: int
    launch_index: int
    job: str = ""
    """Job of a queue that its slot came with; empty where there is none."""
    state: ReplicaState = ReplicaState.LAUNCHED
    join_epoch: int | None = None
    pid: int | None = None
    process_started: float | None = None
    """The kernel's start time of the process: with the pid it names a process for good."""
    launched_at: float = 0.0
    contact_at: float | None = None
    """Time of the process's first call to the scheduler; None until then."""
    ready_at: float | None = None
    """Time at which it first stood at its first training step."""
    retry_join: bool = False
    """It has to aim at a later epoch; cleared when it has been told."""
    gone_at: float | None = None
    exit_status: int | None = None
    stop_requested_at: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A value of a trial's objective at a step, with the progress at that moment. NaN values arrive as None."""

    trial_id: str
    step: int
    value: float | None
    progress: float
    at: float | None = None
    """Time at which it came (seconds since the epoch); None where that was not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of how a trial trained at a moment, for those who look at it later."""

    trial_id: str
    at: float
    """Seconds since the epoch."""
    progress: float
    replicas: int
    batch: int
    """Global, in examples."""
    goodput: float
    """Measured, in examples at the initial batch size a second."""
    predicted_goodput: float | None = None
    """Goodput by the model that the scheduler decides with, at the same size."""
    noise_scale: float | None = None
    """Noise scale of the gradient, in examples; None until it was measured."""
    learning_rate: float | None = None
    step_seconds: float | None = None
    pause_seconds: float | None = None
    """Pause of the latest hand-over, as those that stayed saw it; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job in a queue (Slurm's) that brings slots when it starts."""

    job: str
    queue: str
    slots: int
    waits: bool
    since: float
    """Time of its submission; of its beginning, for one that runs."""
    starts_at: float | None = None
    """Time at which a waiting job is expected to begin, as far as that is known."""
    node: str = ""
    reason: str = ""
    """Why it waits, in the queue's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedSlots:
    slots: int
    where: str
    expected_in: float | None
    """Seconds until the first of them come, where something is known of that."""
    trouble: str = ""
    """Why no more are asked for, for people."""


@dataclass(frozen=True, slots=True)
class SlotQuota:
    """Most slots that some trials may hold together, however many there are."""

    name: str
    """Trials that share it name it alike."""
    slots: int
    sentence: str
    """Sentence for those for whom nothing is left of it."""
