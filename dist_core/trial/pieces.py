"""Pieces: what a replica's trial consists of; each keeps what it owns and is handed what it needs."""

from __future__ import annotations

from typing import Any, TypeVar

from dist_core.generations.generation import Generation
from dist_core.generations.membership import Membership
from dist_core.generations.model_parallel import ModelParallelGroup
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_record import StepRecord
from dist_core.generations.step_vote import StepVote
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment, emulated_profile, standalone_checkpoint_dir
from dist_core.link.news import News
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.random_streams import RandomStreams
from dist_core.state.states import FunctionState, StateRegistry
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.elastic_world import ElasticWorld
from dist_core.trial.emulated_device import EmulatedDevice
from dist_core.trial.hinting import Hinting
from dist_core.trial.leaving import Leaving
from dist_core.trial.loops import Loops
from dist_core.trial.models import Models
from dist_core.trial.pacing import LoopHabits, Pacing
from dist_core.trial.plain_replica import PlainReplica
from dist_core.trial.rendezvous import Rendezvous
from dist_core.trial.rerun import Rerun
from dist_core.trial.rollback import Rollback
from dist_core.trial.same_weights import SameWeights
from dist_core.trial.saving import Saving
from dist_core.trial.steps import Steps
from dist_core.trial.transitions import Transitions
from dist_core.trial.voters import SameOrder, SamePlace, SameRates, WholeSteps

T = TypeVar("T")


class Pieces:
    def __init__(self, environment: ReplicaEnvironment | None, before: PlainReplica | None = None) -> None:
        """``before``: what stood for this process until now; this one takes its place."""
        replica = None if environment is None else before or PlainReplica(environment)
        folder = standalone_checkpoint_dir() if environment is None else environment.checkpoint_dir
        self.environment = environment
        self.channel: ControlChannel | None = None if replica is None else replica.channel
        self.membership: Membership | None = None if replica is None else replica.membership
        self.registry = StateRegistry() if before is None else before.registry
        self.news = News(None if replica is None else replica.hints)
        self.model_parallel = ModelParallelGroup(environment, self.channel)
        self.position = Position()
        self.generation = Generation()
        self.models = Models()
        self.habits = LoopHabits()
        self.record = StepRecord()
        self.random = RandomStreams()
        self.vote = StepVote(self.generation)
        self.sums = RunningSums(met=self.record.note_meeting)
        self.leaving = Leaving(self.membership)
        self.memory_limit = MemoryLimit(folder)
        self.layout = ChosenLayout(environment, self.channel, self.memory_limit, self.model_parallel.members)
        self.states = Persistence(
            folder,
            self.registry,
            part=self.model_parallel.member,
            readers=self.model_parallel.readers,
            replicated=self.models.replicated,
            on_error=self.news.warn,
        )
        self.rollback = Rollback(self.generation, self.position, self.states, self.sums, self.models.trained)
        self.batch = BatchAgreement(
            self.generation,
            self.registry,
            self.memory_limit,
            lambda: self.models.statistics,
            self.layout,
            node_kind="" if environment is None else environment.node_kind,
        )
        self.pacing = Pacing(self.position, self.batch, self.habits)
        self.hinting = Hinting(
            self.generation, self.position, self.models, self.pacing, self.batch, self.layout, self.news
        )
        self.saving = Saving(
            self.generation,
            self.position,
            self.states,
            self.leaving,
            self.rollback,
            self.news,
            self.membership,
            self.model_parallel,
        )
        self.same_weights = SameWeights(self.generation, self.position, self.models, self.news)
        place = SamePlace(self.position)
        self.transitions = Transitions(
            self.generation,
            self.position,
            self.states,
            self.random,
            self.models,
            self.batch,
            self.vote,
            self.record,
            self.sums,
            self.rollback,
            self.saving,
            self.news,
            self.membership,
            self.channel,
        )
        self.rendezvous = Rendezvous(
            self.generation,
            self.position,
            self.record,
            self.leaving,
            self.transitions,
            self.news,
            self.vote,
            place,
            self.same_weights,
        )
        self.loops = Loops(
            self.generation,
            self.position,
            self.states,
            self.models,
            self.pacing,
            self.record,
            self.sums,
            self.rollback,
            self.leaving,
            self.saving,
            self.transitions,
            self.rendezvous,
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
            self.transitions,
            self.hinting,
            self.membership,
            WholeSteps(self.models, self.vote),
            (place, SameOrder(self.pacing), SameRates(self.models), self.same_weights),
        )
        self.rerun = Rerun(
            self.generation,
            self.position,
            self.states,
            self.batch,
            self.sums,
            self.rollback,
            self.loops,
            self.news,
            forget=self._forget_user_code,
        )
        profile = emulated_profile()
        self.emulated_device = None if profile is None else EmulatedDevice(profile.params, self.news.warn)
        if self.emulated_device is not None:
            self.transitions.on_enter.append(self.emulated_device.begin_anew)
        self.transitions.on_enter.append(self.same_weights.begin_anew)
        self.world: ElasticWorld | None = None
        if self.membership is not None:
            self.membership.on_grace_over = self._say_what_is_lost
            self.membership.hurry()
        if folder is not None or environment is not None:
            self.leaving.heed_signals()
        self._register_own_states()

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
        self.news.warn(message)
        self.news.flush()

    def _forget_user_code(self) -> None:
        for piece in (self.registry, self.sums, self.models):
            piece.clear()
        for each in (self.pacing, self.batch, self.loops, self.leaving, self.rollback, self.layout):
            each.forget()
        self.position.begin_run()
        self.vote.reset()
        self.same_weights.begin_anew()
        self._register_own_states()
