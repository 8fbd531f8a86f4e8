"""Virtual time around the live control loop: jobs are submitted, train, say what they measured, and end.

Time advances from decision to decision. Between two of them jobs train on what they hold; at a decision the loop ticks
until nothing changes any more, with replicas that do at once what they are told. So everything that decides (observer,
policy, plan, loop) is the code that runs on a real cluster, and only replicas and clock are simulated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.control_loop import ControlLoop, LoopSettings
from scheduler.simulator.cluster import SimulatedCluster, SimulationSettings
from scheduler.simulator.fairness import MOST_REPLICAS, AliveJobs, isolated_seconds
from scheduler.simulator.oracle import WithOracle
from scheduler.simulator.training import SimulatedTraining
from scheduler.simulator.workload import Submission
from scheduler.snapshot import Policy
from trials.launch import InMemoryLauncher
from trials.record import Outcome, ReplicaState
from trials.spec import TrialSpec
from trials.store import InMemoryTrialStore

MOST_TICKS = 60
"""More ticks than any sequence of launches, moves and pauses takes when replicas obey at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    name: str
    application: str
    submitted_at: float
    finished_at: float
    num_rescales: int
    num_undone: int = 0
    """Changes of size that were taken back before they had paid for their pause."""
    slot_seconds: float
    finish_time_fairness: float = 0.0
    """Completion time over that alone on an equal share of the slots (Themis, NSDI'20, section 3): fair up to 1."""

    @property
    def completion_seconds(self) -> float:
        return self.finished_at - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What happened to a job, and why, as the history of a live trial tells it."""

    at: float
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    policy: str
    jobs: tuple[JobResult, ...]
    makespan_seconds: float
    decisions: int
    allocations: tuple[tuple[float, Mapping[str, Mapping[str, int]]], ...] = field(default=(), repr=False)
    """(time, job -> placement) at each decision that changed something."""
    node_hours: float = 0.0
    cost: float = 0.0
    """Of the nodes, at their prices, where nodes come and go."""
    histories: Mapping[str, tuple[Told, ...]] = field(default_factory=dict, repr=False, compare=False)
    """By the names of the jobs."""


class World:
    def __init__(self, submissions: Sequence[Submission], policy: Policy, settings: SimulationSettings) -> None:
        self.now = 0.0
        self._waiting = sorted(submissions, key=lambda submission: submission.at)
        self._policy = WithOracle(policy, lambda trial_id: self.trainings[trial_id]) if settings.oracle else policy
        self._settings = settings
        self.store = InMemoryTrialStore()
        self.cluster = SimulatedCluster(settings)
        self.launcher = InMemoryLauncher(self.cluster.nodes())
        self.trainings: dict[str, SimulatedTraining] = {}
        self._ended: list[JobResult] = []
        self._allocations: list[tuple[float, Mapping[str, Mapping[str, int]]]] = []
        self._decisions = 0
        self._names: dict[str, str] = {}
        self._alive = AliveJobs()
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
            self._alive.add(self.now, len(self.trainings))
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
            node_hours=self.cluster.node_hours,
            cost=self.cluster.cost,
            histories=self._histories(),
        )

    def _histories(self) -> dict[str, tuple[Told, ...]]:
        def named(sentence: str) -> str:
            return re.sub(r"\bt[0-9a-f]{10}\b", lambda found: self._names.get(found[0], found[0]), sentence)

        return {
            name: tuple(
                Told(at=entry.at, what=entry.what, why=named(entry.reason.sentence))
                for entry in self.store.history(trial_id)
            )
            for trial_id, name in self._names.items()
        }

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
        trial_id = self.store.submit(spec, submission.at).trial_id
        self.trainings[trial_id], self._names[trial_id] = training, submission.name

    def _study_of(self, submission: Submission) -> str:
        return submission.application.name if self._settings.pools else submission.name

    def _replica_bounds(self, submission: Submission, training: SimulatedTraining) -> tuple[int, int]:
        if self._settings.request == "rigid":
            return submission.num_replicas, submission.num_replicas
        most = MOST_REPLICAS if submission.max_replicas is None else submission.max_replicas
        return 1, min(training.most_replicas, self.cluster.most_slots, most)

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
        share = self.cluster.slots / max(1.0, self._alive.mean(submission.at, at))
        self._ended.append(
            JobResult(
                name=submission.name,
                application=submission.application.name,
                submitted_at=submission.at,
                finished_at=at,
                num_rescales=max(0, training.num_rescales),
                num_undone=training.num_undone,
                slot_seconds=training.slot_seconds,
                finish_time_fairness=(at - submission.at)
                / isolated_seconds(submission.application, share, self._settings.slots_per_node),
            )
        )

    def _decide(self) -> None:
        for trial_id, training in self.trainings.items():
            if training.num_rescales >= 0:
                hints = training.hints(
                    declares_length=self._settings.declares_length, pause_seconds=self._settings.rescale_seconds
                )
                self.store.put_hints(trial_id, hints.to_json())
        self.cluster.advance(self.now)
        self._tick_until_at_rest()
        if self.cluster.follow(self.loop.latest_snapshot, self.now):
            self.launcher.replace_nodes(self.cluster.nodes())
            self.loop.decide_anew()
            self._tick_until_at_rest()
        self._decisions += 1
        self._take_placements()

    def _tick_until_at_rest(self) -> None:
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
        shared = self._shared_nodes()
        for trial_id, training in self.trainings.items():
            placement: dict[str, int] = {}
            nodes = {row.replica_id: row.node for row in self.store.replicas(trial_id=trial_id)}
            for member in self.store.trial(trial_id).members:
                placement[nodes[member]] = placement.get(nodes[member], 0) + 1
            if placement != training.placement:
                training.place(placement, self._settings.rescale_seconds, self.now)
                changed = True
            slower = len(placement) > 1 and not shared.isdisjoint(placement)
            kind = self.cluster.kind_of(placement)
            training.run_at(kind.name, kind.speed * (1.0 - self._settings.interference * slower))
        if changed:
            held = {t.submission.name: t.placement for t in self.trainings.values() if t.placement}
            self._allocations.append((self.now, held))

    def _shared_nodes(self) -> set[str]:
        """Nodes with replicas of more than one distributed job."""
        if not self._settings.interference:
            return set()
        distributed: dict[str, set[str]] = {}
        for row in self.store.replicas():
            distributed.setdefault(row.trial_id, set()).add(row.node)
        used = Counter(node for nodes in distributed.values() if len(nodes) > 1 for node in nodes)
        return {node for node, jobs in used.items() if jobs > 1}
