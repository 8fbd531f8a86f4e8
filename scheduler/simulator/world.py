"""Virtual time around the live control loop: jobs are submitted, train, say what they measured, and end.

Time advances from decision to decision, as in published simulators, or from event to event, as it does for a live
scheduler. In the first case the loop ticks at each decision until nothing changes any more, with replicas that do at
once what they are told. In the second it ticks when a live one would be woken, and replicas take their time. In both,
jobs train in between on what they hold, and everything that decides (observer, policy, plan, loop) is the code that
runs on a real cluster: only replicas and clock are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.loop_thread import TICK_SECONDS
from scheduler.loop.settings import LoopSettings
from scheduler.simulator.application import InvalidWorkload
from scheduler.simulator.cluster import SimulatedCluster, SimulationSettings
from scheduler.simulator.fairness import MOST_REPLICAS, AliveJobs, isolated_seconds
from scheduler.simulator.oracle import WithOracle
from scheduler.simulator.replicas import SimulatedReplicas, Timing
from scheduler.simulator.training import SimulatedTraining
from scheduler.simulator.workload import Submission
from scheduler.snapshot import Policy
from trials.launch import InMemoryLauncher
from trials.record import TRIAL_ID, Outcome, Study
from trials.spec import TrialSpec
from trials.store import TrialStore

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
    """Event of a job, and why it happened, as the history of a live trial tells it."""

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
    histories: Mapping[str, tuple[Told, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Histories by name of the job."""


class World:
    def __init__(self, submissions: Sequence[Submission], policy: Policy, settings: SimulationSettings) -> None:
        self.now = 0.0
        self._waiting = sorted(submissions, key=lambda submission: submission.at)
        self._policy = WithOracle(policy, lambda trial_id: self.trainings[trial_id]) if settings.oracle else policy
        self._settings = settings
        self.store = TrialStore()
        self.cluster = SimulatedCluster(settings)
        self.launcher = InMemoryLauncher(self.cluster.nodes())
        self.trainings: dict[str, SimulatedTraining] = {}
        self._ended: list[JobResult] = []
        self._allocations: list[tuple[float, Mapping[str, Mapping[str, int]]]] = []
        self._decisions = 0
        self._names: dict[str, str] = {}
        self._alive = AliveJobs()
        self._timing = settings.timing or Timing()
        self._is_live = settings.timing is not None
        self._woken = True
        """Something has happened, with live timing, that a scheduler would hear of at once."""
        self._ticked_at = 0.0
        self._tick_seconds = max(TICK_SECONDS, settings.decide_every_seconds)
        self._replicas = SimulatedReplicas(
            self.store,
            self.launcher,
            self.trainings,
            self._timing,
            waits_for_step=self._is_live,
            on_news=self._wake,
            on_refusal=lambda: self.loop.decisions.decide_anew(),
        )
        loop_settings = LoopSettings(
            state_dir=Path("/nonexistent"),
            api_url=lambda: "",
            replica_token=lambda trial_id: "",
            base_environ={},
            decide_every_seconds=settings.decide_every_seconds,
            decide_on_loss_or_end=self._is_live,
            # Simulated replicas do not call; they do not hang either.
            silence_seconds=math.inf,
        )
        if not self._is_live:
            loop_settings = replace(loop_settings, move_patience_seconds=0.0)
        self.loop = ControlLoop(
            self.store,
            self.launcher,
            self._policy,
            loop_settings,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )

    def run(self) -> SimulationResult:
        """Until all jobs have ended; raises TimeoutError when they do not within ``longest_seconds``."""
        while self._waiting or self.trainings:
            self._pass_time()
            self._alive.add(self.now, len(self.trainings))
            if self.now > self._settings.longest_seconds:
                raise TimeoutError(
                    f"{len(self._waiting) + len(self.trainings)} jobs have not ended after {self.now:.0f} s of virtual "
                    f"time (longest_seconds={self._settings.longest_seconds:.0f}); give it more nodes or more time"
                )
            self._note_progress()
            self._submit_due()
            if self._is_live:
                self._react()
            elif self.trainings:
                self._decide()
        return SimulationResult(
            policy=self._policy.name,
            jobs=tuple(sorted(self._ended, key=lambda job: (job.submitted_at, job.name))),
            makespan_seconds=max((job.finished_at for job in self._ended), default=0.0),
            decisions=self._decisions,
            allocations=tuple(self._allocations),
            node_hours=self.cluster.node_hours,
            histories=self._histories(),
        )

    def _pass_time(self) -> None:
        """Let time pass until the next decision or event; jobs train meanwhile."""
        if self._is_live:
            until = self._next_event()
        else:
            interval = self._settings.decide_every_seconds
            if not self.trainings:
                # Nothing happens before the next job comes.
                self.now = max(self.now, interval * (self._waiting[0].at // interval))
            until = self.now + interval
        for training in self.trainings.values():
            training.advance(self.now, until - self.now)
        self.now = until

    def _next_event(self) -> float:
        """Return when the next event is due, with live timing."""
        times = [self._next_submission(), self._replicas.next_event(self.now)]
        if self.trainings:
            times.append(self._ticked_at + self._tick_seconds)
        times += [self.now + training.epoch_ends_in for training in self.trainings.values()]
        return max(self.now, min(times))

    def _next_submission(self) -> float:
        return self._waiting[0].at if self._waiting else math.inf

    def _put_study(self, study: Study) -> None:
        """Put a study with a driver where time is live: only there can its next trial be about to come."""
        owner, seen_at = ("tuner", math.inf) if self._is_live else (None, None)
        self.store.put_study(replace(study, owner=owner, owner_seen_at=seen_at))

    def _wake(self) -> None:
        self._woken = True

    def _react(self) -> None:
        """Let simulated replicas act, then tick the loop while it is woken or due."""
        self._replicas.obey(self.now)
        while self._woken or self.now >= self._ticked_at + self._tick_seconds:
            self._woken, self._ticked_at = False, self.now
            self._say_hints()
            self.cluster.advance(self.now)
            self.loop.tick()
            if self.loop.decisions.error is not None:
                raise self.loop.decisions.error
            if self.cluster.follow(self.loop.decisions.snapshot, self.now):
                self.launcher.replace_nodes(self.cluster.nodes())
                self.loop.decisions.decide_anew()
                self._woken = True
            self._decisions += 1
            self._replicas.obey(self.now)
            self._take_placements()

    def _histories(self) -> dict[str, tuple[Told, ...]]:
        def named(sentence: str) -> str:
            return TRIAL_ID.sub(lambda found: self._names.get(found[0], found[0]), sentence)

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
        training = SimulatedTraining(submission, self._settings.request, exact=self._is_live)
        least, most = self._replica_bounds(submission, training)
        sizes = submission.replica_sizes
        if least * sizes[0] > self.cluster.most_slots:
            raise InvalidWorkload(
                f"{submission.name} needs {least * sizes[0]} slots and the cluster has at most "
                f"{self.cluster.most_slots}; it would wait for ever"
            )
        spec = TrialSpec(
            study=self._study_of(submission),
            number=len(self.store.trials()),
            entrypoint="simulated:training",
            min_replicas=least,
            max_replicas=most,
            slots_per_replica=sizes[0],
            replica_sizes=() if submission.choices is None else sizes,
        )
        trial_id = self.store.submit(spec, submission.at).trial_id
        self._wake()
        self.trainings[trial_id], self._names[trial_id] = training, submission.name

    def _study_of(self, submission: Submission) -> str:
        return submission.application.name if self._settings.pools else submission.name

    def _replica_bounds(self, submission: Submission, training: SimulatedTraining) -> tuple[int, int]:
        if self._settings.request == "rigid":
            return submission.num_replicas, submission.num_replicas
        most = MOST_REPLICAS if submission.max_replicas is None else submission.max_replicas
        room = max(1, self.cluster.most_slots // submission.replica_sizes[0])
        return 1, min(training.most_replicas, room, most)

    def _note_progress(self) -> None:
        """Note what jobs did since the last decision: here, that some have come to their end."""
        for trial_id, training in list(self.trainings.items()):
            if training.finished_at is not None:
                self._end(trial_id, Outcome(kind="value", value=0.0), training.finished_at)

    def _end(self, trial_id: str, outcome: Outcome, at: float) -> None:
        training = self.trainings.pop(trial_id)
        self.store.set_outcome(trial_id, outcome)
        self._wake()
        for replica in self.store.replicas(trial_id=trial_id):
            self._replicas.leave(replica.replica_id, at)
        submission = training.submission
        size = submission.share_size
        share = self.cluster.slots / max(1.0, self._alive.mean(submission.at, at)) / size
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
                / isolated_seconds(submission.application, share, max(1, self._settings.slots_per_node // size)),
            )
        )

    def _say_hints(self) -> None:
        for trial_id, training in self.trainings.items():
            if training.num_rescales >= 0:
                hints = training.hints(
                    declares_length=self._settings.declares_length, pause_seconds=self._settings.rescale_seconds
                )
                self.store.put_hints(trial_id, hints.to_json())

    def _decide(self) -> None:
        self._say_hints()
        self.cluster.advance(self.now)
        self._tick_until_at_rest()
        if self.cluster.follow(self.loop.decisions.snapshot, self.now):
            self.launcher.replace_nodes(self.cluster.nodes())
            self.loop.decisions.decide_anew()
            self._tick_until_at_rest()
        self._decisions += 1
        self._take_placements()

    def _tick_until_at_rest(self) -> None:
        quiet = 0
        for _ in range(MOST_TICKS):
            before = self.store.writes
            self.loop.tick()
            if self.loop.decisions.error is not None:
                raise self.loop.decisions.error
            self._replicas.obey(self.now)
            # A trial whose new slots are held by others notices that in one tick, and gives up its own in the next.
            quiet = quiet + 1 if self.store.writes == before else 0
            if quiet == 2:
                break
        else:
            raise AssertionError(f"the loop has not come to rest after {MOST_TICKS} ticks at {self.now} s")

    def _take_placements(self) -> None:
        changed = False
        for trial_id, training in self.trainings.items():
            placement: dict[str, int] = {}
            nodes = {row.replica_id: row.node for row in self.store.replicas(trial_id=trial_id)}
            record = self.store.trial(trial_id)
            for member in record.members:
                placement[nodes[member]] = placement.get(nodes[member], 0) + 1
            before = training.layout
            if placement and record.layout:
                training.hold(record.layout)
            if placement != training.placement or training.layout != before:
                training.place(placement, self._settings.rescale_seconds, self.now)
                changed = True
        if changed:
            held = {t.submission.name: t.placement for t in self.trainings.values() if t.placement}
            self._allocations.append((self.now, held))
