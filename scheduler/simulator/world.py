"""Virtual time around the live control loop: jobs are submitted, train, say what they measured, and end.

Time advances from decision to decision. Between two of them jobs train on what they hold; at a decision the loop ticks
until nothing changes any more, with replicas that do at once what they are told. So everything that decides (observer,
policy, plan, loop) is the code that runs on a real cluster, and only replicas and clock are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.control_loop import ControlLoop, LoopSettings
from scheduler.simulator.oracle import WithOracle
from scheduler.simulator.training import Request, SimulatedTraining
from scheduler.simulator.workload import Submission
from scheduler.snapshot import Policy
from trials.launch import InMemoryLauncher
from trials.record import Outcome, ReplicaState
from trials.spec import TrialSpec
from trials.store import InMemoryTrialStore

MOST_REPLICAS = 64
"""Further replicas were not measured."""
MOST_TICKS = 60
"""More ticks than any sequence of launches, moves and pauses takes when replicas obey at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    nodes: int = 16
    slots_per_node: int = 4
    decide_every_seconds: float = 60.0
    rescale_seconds: float = 30.0
    """Pause of a job whose placement changes, the first start included."""
    request: Request = "elastic"
    declares_length: bool = True
    """Jobs say how many epochs they will train."""
    oracle: bool = False
    """The policy is told true speeds and remaining work."""
    pools: bool = True
    """Jobs that run the same code are one study, whose measurements are pooled."""
    longest_seconds: float = 30 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    name: str
    application: str
    submitted_at: float
    finished_at: float
    num_rescales: int
    slot_seconds: float

    @property
    def completion_seconds(self) -> float:
        return self.finished_at - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    policy: str
    jobs: tuple[JobResult, ...]
    makespan_seconds: float
    decisions: int
    allocations: tuple[tuple[float, Mapping[str, Mapping[str, int]]], ...] = field(default=(), repr=False)
    """(time, job -> placement) at each decision that changed something."""


class World:
    def __init__(self, submissions: Sequence[Submission], policy: Policy, settings: SimulationSettings) -> None:
        self.now = 0.0
        self._waiting = sorted(submissions, key=lambda submission: submission.at)
        self._policy = WithOracle(policy, lambda trial_id: self.trainings[trial_id]) if settings.oracle else policy
        self._settings = settings
        self.store = InMemoryTrialStore()
        width = len(str(settings.nodes - 1))
        self.launcher = InMemoryLauncher(
            {f"n{index:0{width}}": settings.slots_per_node for index in range(settings.nodes)}
        )
        self.trainings: dict[str, SimulatedTraining] = {}
        self._ended: list[JobResult] = []
        self._allocations: list[tuple[float, Mapping[str, Mapping[str, int]]]] = []
        self._decisions = 0
        self.loop = ControlLoop(
            self.store,
            self.launcher,
            self._policy,
            LoopSettings(
                state_dir=Path("/nonexistent"),
                api_url=lambda: "",
                replica_token=lambda trial_id: "",
                base_environ={},
                decide_every_seconds=settings.decide_every_seconds,
                move_patience_seconds=0.0,
            ),
            clock=lambda: self.now,
        )

    def run(self) -> SimulationResult:
        """Until all jobs have ended; raises TimeoutError when they do not within ``longest_seconds``."""
        interval = self._settings.decide_every_seconds
        while self._waiting or self.trainings:
            if not self.trainings:
                # Nothing happens before the next job comes.
                self.now = max(self.now, interval * (self._waiting[0].at // interval))
            for training in self.trainings.values():
                training.advance(self.now, interval)
            self.now += interval
            if self.now > self._settings.longest_seconds:
                raise TimeoutError(f"{len(self.trainings)} jobs have not ended after {self.now:.0f} s")
            self._note_progress()
            self._submit_due()
            if self.trainings:
                self._decide()
        return SimulationResult(
            policy=self._policy.name,
            jobs=tuple(sorted(self._ended, key=lambda job: (job.submitted_at, job.name))),
            makespan_seconds=max((job.finished_at for job in self._ended), default=0.0),
            decisions=self._decisions,
            allocations=tuple(self._allocations),
        )

    def _submit_due(self) -> None:
        """Submit what has come since the last decision."""
        while self._waiting and self._waiting[0].at <= self.now:
            self._submit(self._waiting.pop(0))

    def _submit(self, submission: Submission) -> None:
        training = SimulatedTraining(submission, self._settings.request)
        least, most = self._replica_bounds(submission, training)
        spec = TrialSpec(
            study=self._study_of(submission),
            number=len(self.store.trials()),
            entrypoint="simulated:training",
            min_replicas=least,
            max_replicas=most,
        )
        self.trainings[self.store.submit(spec, submission.at).trial_id] = training

    def _study_of(self, submission: Submission) -> str:
        return submission.application.name if self._settings.pools else submission.name

    def _replica_bounds(self, submission: Submission, training: SimulatedTraining) -> tuple[int, int]:
        if self._settings.request == "rigid":
            return submission.num_replicas, submission.num_replicas
        total = self._settings.nodes * self._settings.slots_per_node
        return 1, min(training.most_replicas, total, MOST_REPLICAS)

    def _note_progress(self) -> None:
        """What jobs did since the last decision: here, that some have come to their end."""
        for trial_id, training in list(self.trainings.items()):
            if training.finished_at is not None:
                self._end(trial_id, Outcome(kind="value", value=0.0), training.finished_at)

    def _end(self, trial_id: str, outcome: Outcome, at: float) -> None:
        training = self.trainings.pop(trial_id)
        self.store.set_outcome(trial_id, outcome)
        for replica in self.store.replicas(trial_id=trial_id):
            self.launcher.end(replica.replica_id)
        submission = training.submission
        self._ended.append(
            JobResult(
                name=submission.name,
                application=submission.application.name,
                submitted_at=submission.at,
                finished_at=at,
                num_rescales=max(0, training.num_rescales),
                slot_seconds=training.slot_seconds,
            )
        )

    def _decide(self) -> None:
        for trial_id, training in self.trainings.items():
            if training.num_rescales >= 0:
                hints = training.hints(
                    declares_length=self._settings.declares_length, pause_seconds=self._settings.rescale_seconds
                )
                self.store.put_hints(trial_id, hints.to_json())
        quiet = 0
        for _ in range(MOST_TICKS):
            before = self.store.writes
            self.loop.tick()
            if self.loop.policy_error is not None:
                raise self.loop.policy_error
            self._obey()
            # A trial whose new slots are held by others notices that in one tick, and gives up its own in the next.
            quiet = quiet + 1 if self.store.writes == before else 0
            if quiet == 2:
                break
        else:
            raise AssertionError(f"the loop has not come to rest after {MOST_TICKS} ticks at {self.now} s")
        self._decisions += 1
        self._take_placements()

    def _obey(self) -> None:
        """Replicas and trials do what the loop has asked for."""
        for trial_id in self.trainings:
            trial = self.store.trial(trial_id)
            replicas = self.store.replicas(trial_id=trial_id)
            for replica in replicas:
                if replica.state is ReplicaState.LAUNCHED:
                    epoch = self.trainings[trial_id].epoch if trial.members else None
                    self.store.update_replica(
                        replica.replica_id,
                        state=ReplicaState.READY,
                        join_epoch=epoch,
                        contact_at=self.now,
                        ready_at=self.now,
                    )
            if trial.switching and trial.entered < trial.published:
                if trial.published_members:
                    self.store.note_entered(trial_id, trial.published)
                for replica in replicas:
                    left = replica.replica_id in trial.members and replica.replica_id not in trial.published_members
                    if left and replica.replica_id in self.launcher.running:
                        self.launcher.end(replica.replica_id)
                        self.store.writes += 1

    def _take_placements(self) -> None:
        changed = False
        for trial_id, training in self.trainings.items():
            placement: dict[str, int] = {}
            nodes = {row.replica_id: row.node for row in self.store.replicas(trial_id=trial_id)}
            for member in self.store.trial(trial_id).members:
                placement[nodes[member]] = placement.get(nodes[member], 0) + 1
            if placement != training.placement:
                training.place(placement, self._settings.rescale_seconds)
                changed = True
        if changed:
            held = {t.submission.name: t.placement for t in self.trainings.values() if t.placement}
            self._allocations.append((self.now, held))
