"""TrainingCore: one replica of a trial, put together. One per replica process.

The loader, the wrapped models and the epoch loop report here; each piece keeps what it owns and is handed what it
needs. Everything runs on the training thread, except the methods that say otherwise. User code never sees it;
``training`` holds the names it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dist_core.data.batch_size import Adaptation
from dist_core.device import release_cached_memory
from dist_core.generations.present import DRY_STEPS, PresentGeneration
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_record import StepRecord
from dist_core.generations.step_vote import StepVote
from dist_core.generations.watch import Membership
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment, emulated_profile, standalone_checkpoint_dir
from dist_core.link.news import News
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.random_streams import RandomStreams
from dist_core.state.seeds import seed_all, trial_seed
from dist_core.state.states import FunctionState, StateRegistry
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.changes import Changes
from dist_core.trial.elastic_world import ElasticWorld
from dist_core.trial.emulated_device import EmulatedDevice
from dist_core.trial.hinting import Hinting
from dist_core.trial.leaving import Leaving
from dist_core.trial.loop_habits import LoopHabits
from dist_core.trial.loops import Loops
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
from dist_core.trial.participants import PacingLoader
from dist_core.trial.plain_replica import PlainReplica
from dist_core.trial.rerun import Rerun
from dist_core.trial.saving import Saving
from dist_core.trial.steps import Steps
from dist_core.trial.together import Together
from dist_core.trial.way_back import WayBack

T = TypeVar("T")


class TrainingCore:
    def __init__(self, environment: ReplicaEnvironment | None, before: PlainReplica | None = None) -> None:
        """``before``: what stood for this process until now; this one takes its place."""
        replica = None if environment is None else before or PlainReplica(environment)
        folder = standalone_checkpoint_dir() if environment is None else environment.checkpoint_dir
        self.environment = environment
        self.channel: ControlChannel | None = None if replica is None else replica.channel
        self.membership: Membership | None = None if replica is None else replica.membership
        self.registry = StateRegistry() if before is None else before.registry
        self.news = News(None if replica is None else replica.hints)
        self.position = Position()
        self.generation = PresentGeneration()
        self.models = Models()
        self.habits = LoopHabits()
        self.record = StepRecord()
        self.random = RandomStreams()
        self.vote = StepVote(self.generation)
        self.sums = RunningSums(met=self.record.note_meeting)
        self.leaving = Leaving(self.membership)
        self.memory_limit = MemoryLimit(folder)
        self.states = Persistence(folder, self.registry, replicated=self.models.replicated, on_error=self.warn)
        self.way_back = WayBack(self.generation, self.position, self.states, self.sums, self.models.trained)
        self.batch = BatchAgreement(
            self.generation,
            self.registry,
            self.memory_limit,
            lambda: self.models.statistics,
            node_kind="" if environment is None else environment.node_kind,
        )
        self.pacing = Pacing(self.position, self.models, self.batch, self.habits)
        self.hinting = Hinting(self.generation, self.position, self.models, self.pacing, self.batch, self.news)
        self.saving = Saving(
            self.generation,
            self.position,
            self.states,
            self.vote,
            self.leaving,
            self.way_back,
            self.news,
            self.membership,
        )
        self.changes = Changes(
            self.generation,
            self.position,
            self.states,
            self.random,
            self.models,
            self.batch,
            self.vote,
            self.record,
            self.sums,
            self.way_back,
            self.saving,
            self.news,
            self.membership,
            self.channel,
        )
        self.meeting = Together(self.generation, self.position, self.record, self.leaving, self.changes, self.news)
        self.loops = Loops(
            self.generation,
            self.position,
            self.states,
            self.models,
            self.pacing,
            self.vote,
            self.record,
            self.sums,
            self.way_back,
            self.leaving,
            self.saving,
            self.changes,
            self.meeting,
            self.news,
        )
        self.steps = Steps(
            self.generation,
            self.position,
            self.models,
            self.pacing,
            self.batch,
            self.habits,
            self.vote,
            self.record,
            self.sums,
            self.leaving,
            self.saving,
            self.changes,
            self.hinting,
            self.membership,
        )
        self.rerun = Rerun(
            self.generation,
            self.position,
            self.states,
            self.batch,
            self.sums,
            self.way_back,
            self.loops,
            self.news,
            forget=self._forget_user_code,
        )
        profile = emulated_profile()
        self.emulated_device = None if profile is None else EmulatedDevice(profile.params, self.warn)
        if self.emulated_device is not None:
            self.changes.on_enter.append(self.emulated_device.begin_anew)
        self.world: ElasticWorld | None = None
        if self.membership is not None:
            self.membership.on_grace_over = self._say_what_is_lost
            self.membership.hurry()
        if folder is not None or environment is not None:
            self.leaving.heed_signals()
        self._register_own_states()

    def offer_world(self) -> None:
        """Let ``torch.distributed`` work on this trial's replicas, unless the script has set it up for itself."""
        if self.environment is not None and not torch.distributed.is_initialized():
            self.world = ElasticWorld(
                self.generation,
                self.position,
                self.meeting,
                rank=self.environment.launch_index,
                expected=self.environment.replicas,
                takes_part=lambda: not self.passes_do_not_count,
            )
            self.world.install()
            self.changes.on_enter.append(self.world.install)

    def _register_own_states(self) -> None:
        self.registry.register("core", FunctionState(self._save, self._load))
        self.registry.register("random", self.random)
        self.registry.register("checkpoints", self.states.checkpoints)

    def _save(self) -> dict[str, Any]:
        return {**self.position.state_dict(), **self.habits.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.position.load_state_dict(state)
        self.habits.load_state_dict(state)

    def _say_what_is_lost(self, message: str) -> None:
        self.warn(message)
        self.news.flush()

    # ------------------------------------------------------------------ code that runs again

    def can_run_again(self, error: BaseException) -> bool:
        """Whether the user's code, which ended with this error, is to run again from its top; made ready for that."""
        ready = self.rerun.is_made_ready(error)
        if ready and self.environment is not None:
            seed_all(trial_seed(self.environment.trial_id))
        return ready

    def _forget_user_code(self) -> None:
        for piece in (self.registry, self.sums, self.models):
            piece.clear()
        for each in (self.pacing, self.batch, self.loops, self.leaving, self.way_back):
            each.forget()
        self.position.begin_run()
        self.vote.reset()
        self._register_own_states()

    def free_device_memory(self) -> None:
        release_cached_memory()

    # ------------------------------------------------------------------ what the process's other code asks

    @property
    def present(self) -> TrainingCore:
        return self

    @property
    def joined(self) -> bool:
        return self.generation.joined

    @property
    def broken(self) -> str | None:
        return self.generation.broken

    @property
    def is_outside(self) -> bool:
        return self.generation.is_outside

    @property
    def stands_alone(self) -> bool:
        return self.generation.stands_alone

    @property
    def reports(self) -> bool:
        """Whether this replica speaks for the trial: rank 0, or the first one launched while ranks are not given."""
        if self.generation.joined or self.environment is None:
            return self.generation.group.rank == 0
        return self.environment.launch_index == 0

    @property
    def passes_do_not_count(self) -> bool:
        """Whether what the loop's body does now has no effect on the trial, and takes part in nothing."""
        return self.loops.replaying or self.generation.is_outside

    @property
    def buckets_settled(self) -> bool:
        """Whether the models' gradient buckets are in the order of a joiner's, or nobody will ever join."""
        return self.environment is None or self.position.own_steps >= DRY_STEPS

    @property
    def progress(self) -> float:
        return self.position.progress

    @property
    def epoch_position(self) -> float:
        """Where training stands, in epochs and parts of the present one."""
        return self.position.in_epochs(self.pacing.epoch_size)

    @property
    def adaptation(self) -> Adaptation | None:
        return self.batch.adaptation

    @property
    def loader(self) -> PacingLoader | None:
        return self.pacing.loader

    def together(self, action: Callable[[ReplicaGroup], T], *, otherwise: Callable[[], T] | None = None) -> T:
        return self.meeting.do(action, otherwise=otherwise)

    def mean_over_replicas(self, value: float) -> float:
        """Of a number that every replica has, perhaps its own."""
        return value if self.loops.replaying else self.meeting.mean_of(value)

    def raise_postponed(self) -> None:
        self.leaving.raise_postponed()

    def leave_if_asked(self) -> None:
        self.saving.leave_if_asked()

    def warn(self, message: str) -> None:
        """A sentence for whoever reads this trial's history and its log."""
        self.news.warn(message)

    def close(self) -> None:
        """The user's code is done: send what is queued and stop the threads. A last checkpoint may be in flight."""
        self.news.flush()
        if self.membership is not None:
            self.membership.stop()
        if self.channel is not None:
            self.channel.close()
