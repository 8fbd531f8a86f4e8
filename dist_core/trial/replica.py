"""Replica: one process of a trial, as its other code sees it, and the parts that it is made of.

A part owns its attributes and is handed the few others that it uses; what has to be told to many goes by two lists.
``round.voters`` ride on the one reduction of each step, and their order is the protocol of a step. ``life.listeners``
are told of the events of the replica's life, in order. A new ballot, event or rescue is one file and a line here.

The loader, the wrapped models and the epoch loop report here. Everything runs on the training thread, except the
methods that say otherwise. User code never sees a replica; ``training`` holds the names that it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from dist_core.data.batch_size import Adaptation
from dist_core.device import release_cached_memory
from dist_core.errors import DistCoreError
from dist_core.generations.generation import DRY_STEPS, Generation
from dist_core.generations.membership import Membership
from dist_core.generations.model_parallel import ModelParallelGroup
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.running_sums import RunningSums
from dist_core.generations.step_record import StepRecord
from dist_core.generations.step_vote import StepVote, Voter
from dist_core.generations.switch import Switch
from dist_core.gradients.patched_calls import models_of
from dist_core.life import Life, Listener
from dist_core.link.client import ControlChannel
from dist_core.link.environment import (
    ReplicaEnvironment,
    emulated_profile,
    standalone_checkpoint_dir,
    standalone_world,
)
from dist_core.link.news import News
from dist_core.older_python import add_note
from dist_core.state.counts import LoopSums
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.persistence import Persistence
from dist_core.state.position import Position
from dist_core.state.random_streams import RandomStreams
from dist_core.state.script_variables import NAME as VARIABLES
from dist_core.state.script_variables import ScriptVariables
from dist_core.state.seeds import seed_all, trial_seed
from dist_core.state.states import FunctionState, Stateful, StateRegistry
from dist_core.trial.batch_agreement import BatchAgreement
from dist_core.trial.chosen_layout import ChosenLayout
from dist_core.trial.departure import Departure, Leaving, Preemption
from dist_core.trial.elastic_world import ElasticWorld
from dist_core.trial.emulated_device import EmulatedDevice
from dist_core.trial.entering import Arrival, Entering, ScheduledArrival, StandaloneArrival
from dist_core.trial.epochs import Epochs, Resumption
from dist_core.trial.healing import Healing, Heals, NoHealing, TrainingSurvivor
from dist_core.trial.loops import EvaluationState, Loops, OutsideOfLoops, Rerun
from dist_core.trial.models import Models
from dist_core.trial.pacing import Hinting, LoopHabits, Pacing
from dist_core.trial.participants import PacingLoader
from dist_core.trial.plain_replica import PlainReplica
from dist_core.trial.rendezvous import MetricMean, Rendezvous
from dist_core.trial.rollback import Rollback
from dist_core.trial.same_weights import MovingBuffers, SameWeights
from dist_core.trial.saving import Saving
from dist_core.trial.script_habits import ScriptHabits
from dist_core.trial.steps import SharedStep, Steps
from dist_core.trial.transitions import Transitions
from dist_core.trial.voters import SameCode, SameOrder, SamePlace, SameRates, SameUpdates

T = TypeVar("T")


class Replica:
    def __init__(self, environment: ReplicaEnvironment | None, before: PlainReplica | None = None) -> None:
        """``before``: what stood for this process until now; this one takes its place."""
        line = None if environment is None else before or PlainReplica(environment)
        folder = standalone_checkpoint_dir() if environment is None else environment.checkpoint_dir
        self.environment = environment
        self.channel: ControlChannel | None = None if line is None else line.channel
        self.membership: Membership | None = None if line is None else line.membership
        self.news = News(None if line is None else line.hints)
        self.life = Life()
        self.world: ElasticWorld | None = None
        self._make_state(folder, StateRegistry() if before is None else before.registry)
        self._make_batch()
        self.round = StepVote(self.generation, lambda: None if self.membership is None else self.membership.pending())
        self.sums = RunningSums(self.generation, self.position, self.registry, self.record.note_meeting)
        self.rollback = Rollback(
            self.generation, self.position, self.states, self.sums, self.models.trained, self.variables
        )
        self.leaving = Leaving(self.membership)
        self.saving = Saving(
            self.generation,
            self.position,
            self.states,
            request=lambda: "" if self.membership is None else self.membership.save_request,
            announce=self.news.announce,
            keeps_end=environment is not None and environment.keeps_state,
            keeps_after=() if environment is None else environment.keeps_after,
        )
        self.departure = Departure(
            self.generation, self.leaving, self.saving, self.rollback, self.news, self.model_parallel
        )
        self.shared_step = SharedStep(self.generation, self.models, self.round)
        self.arrival: Arrival
        self.healing: Heals
        self.transitions: Voter | None = None
        if self.membership is not None and self.channel is not None:
            self._meet_through_scheduler(self.membership, self.channel)
        else:
            self.healing = NoHealing(self.generation, self.sums)
            self.arrival = StandaloneArrival(
                self.generation, self.position, self.states, self.models, self.batch, self.life
            )
        self._make_loops()
        self._vote()
        self._listen()
        if folder is not None or environment is not None:
            self.leaving.heed_signals()

    # ------------------------------------------------------------------ what it is made of

    def _make_state(self, folder: Any, registry: StateRegistry) -> None:
        self.registry = registry
        self.generation = Generation()
        self.position = Position()
        self.habits = LoopHabits()
        self.record = StepRecord()
        self.random = RandomStreams()
        self.models = Models(self.generation)
        self.variables = ScriptVariables(self.position, self._belongs_to_trial, self.news.warn)
        self.memory_limit = MemoryLimit(folder)
        self.model_parallel = ModelParallelGroup(self.environment, self.channel)
        self.states = Persistence(
            folder,
            self.registry,
            part=self.model_parallel.member,
            readers=self.model_parallel.readers,
            replicated=self.models.replicated,
            on_error=self.news.warn,
            on_written=lambda: self.saving.written(),
            parent="" if self.environment is None else self.environment.parent,
            while_waiting=self.leave_if_asked,
        )

    def _make_batch(self) -> None:
        self.layout = ChosenLayout(self.environment, self.channel, self.memory_limit, self.model_parallel.members)
        self.batch = BatchAgreement(
            self.generation,
            self.registry,
            self.memory_limit,
            lambda: self.models.statistics,
            self.layout,
            node_kind="" if self.environment is None else self.environment.node_kind,
        )
        self.pacing = Pacing(self.position, self.batch, self.habits)
        self.script_habits = ScriptHabits(self.generation, self.variables, self.models, self.pacing, self.news.warn)
        self.hinting = Hinting(self.generation, self.position, self.models, self.pacing, self.layout, self.news)

    def _meet_through_scheduler(self, membership: Membership, channel: ControlChannel) -> None:
        generation, position, states = self.generation, self.position, self.states
        membership.group_needs = lambda: self.models.group_needs
        membership.on_loss = generation.note_losses
        membership.on_grace_over = self._say_what_is_lost
        membership.hurry()
        entering = Entering(generation, membership, self.batch, self.news, self.life)
        survivor = TrainingSurvivor(position, states, self.record, self.sums, self.rollback, self.life)
        healing = self.healing = Healing(generation, membership, self.news, survivor, entering, self.life)
        switch = Switch(generation, membership, position, states, self.news)
        self.transitions = Transitions(generation, switch, healing, entering, self.departure, self.sums)
        self.arrival = ScheduledArrival(generation, membership, channel, position, states, entering)

    def _make_loops(self) -> None:
        generation, position = self.generation, self.position
        self.same_weights = SameWeights(generation, position, self.models, self.news)
        self.same_place = SamePlace(position)
        self.moving_buffers = MovingBuffers(generation, self.models)
        same_code = SameCode(generation, self.round, self.same_place, self.same_weights)
        self.rendezvous = Rendezvous(generation, position, self.record, self.leaving, self.healing, same_code)
        self.metric_mean = MetricMean(generation, self.rendezvous, self.news)
        self.resumption = Resumption(generation, position, self.states, self.arrival, self.life)
        self.epochs = Epochs(
            position,
            self.resumption,
            self.pacing,
            self.sums,
            self.leaving,
            self.life,
            more_epochs=0 if self.environment is None else self.environment.more_epochs,
        )
        self.outside = OutsideOfLoops(
            self.environment, generation, self.resumption, self.random, self.pacing, self.news
        )
        self.loops = Loops(position, self.rollback, self.leaving, self.life)
        self.steps = Steps(self.shared_step, position, self.models, self.pacing, self.healing, self.life)
        self.rerun = Rerun(generation, self.batch, self.loops, self.rollback, self.news, self.life)
        profile = emulated_profile()
        self.emulated_device = None if profile is None else EmulatedDevice(profile.params, self.news.warn)

    def _vote(self) -> None:
        """Declare the protocol of a step: what rides on its round, and the order in which it is taken up."""
        voters: list[Voter | None] = [
            self.shared_step,
            self.same_place,
            SameOrder(self.pacing),
            SameUpdates(self.record),
            SameRates(self.models),
            self.same_weights,
            self.sums,
            self.models,
            self.moving_buffers,
            self.batch,
            Preemption(self.position, self.leaving, self.sums, self.departure),
            self.transitions,
            self.saving,
        ]
        self.round.voters = [voter for voter in voters if voter is not None]

    def _listen(self) -> None:
        """Say who is told of this replica's life, in order."""
        loop_sums = LoopSums(self.position, lambda: self.generation.group.world_size == 1)
        others: dict[str, Stateful] = {
            "random": self.random,
            "checkpoints": self.states.checkpoints,
            VARIABLES: self.variables,
            "sums of the loop": loop_sums,
        }
        own = OwnStates(self.position, self.habits, self.registry, others)
        listeners: list[Listener | None] = [
            own,
            self.variables,
            loop_sums,
            self.random,
            self.emulated_device,
            self.same_weights,
            self.moving_buffers,
            self.news,
            self.states.checkpoints,
            self.models,
            self.batch,
            self.round,
            self.record,
            self.sums,
            self.pacing,
            self.loops,
            self.leaving,
            self.layout,
            self.resumption,
            EvaluationState(self.generation, self.models, self.rendezvous, self.sums),
            self.saving,
            self.rollback,
            self.hinting,
            self.script_habits,
        ]
        self.life.listeners = [listener for listener in listeners if listener is not None]
        own.register()

    def _belongs_to_trial(self) -> Callable[[Any], bool]:
        """Return a test that tells of a script's object whether it is trained, or another state that the trial has."""
        modules = {id(each) for model in self.models for each in model.module.modules()}
        trained = {id(each) for each in self.models.trained()}

        def belongs(value: Any) -> bool:
            if isinstance(value, torch.nn.Module):
                # Or a module of its own over trained weights, as a tied layer is.
                own = value.parameters(recurse=False)
                return id(value) in modules or any(id(each) in trained for each in own)
            if isinstance(value, torch.optim.Optimizer) and models_of(value):
                return True
            return self.registry.holds(value)

        return belongs

    def _say_what_is_lost(self, message: str) -> None:
        self.news.warn(message)
        self.news.flush()

    def offer_world(self) -> None:
        """Let ``torch.distributed`` work on this trial's replicas, unless the script has set it up for itself."""
        if self.environment is not None and not torch.distributed.is_initialized():
            self.world = ElasticWorld(
                self.generation,
                self.position,
                self.rendezvous,
                rank=self.environment.launch_index,
                expected=self.environment.replicas,
                takes_part=self._takes_part,
            )
            self.world.install()
            self.life.on_entering(self.world.install)

    def _takes_part(self) -> bool:
        """Tell whether a collective of the script's own has an effect now."""
        if self.loops.note_collective():
            self.news.warn(
                "a collective of the script's own follows an evaluation in which each replica computed all samples: a "
                "sum over the replicas counts each of them several times. Evaluations are shared from now on; set "
                "shares_evaluation = True on the loader to share the first as well"
            )
        return not self.passes_do_not_count

    # ------------------------------------------------------------------ code that runs again

    def can_run_again(self, error: BaseException) -> bool:
        """Tell whether the user's code, which ended with this error, is to run again; made ready for that."""
        ready = self.rerun.is_made_ready(error)
        if ready and self.environment is not None:
            seed_all(trial_seed(self.environment.trial_id, self.environment.seed))
        return ready

    def explain(self, error: BaseException) -> None:
        """Add to an error of the training loop what of its batch, or of the gradients that it sees, is the trial's."""
        if isinstance(error, Exception) and not isinstance(error, DistCoreError):
            for note in self.habits.notes(error):
                add_note(error, note)

    def free_device_memory(self) -> None:
        release_cached_memory()

    # ------------------------------------------------------------------ what the process's other code asks

    @property
    def present(self) -> Replica:
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
        """Tell whether this replica speaks for the trial: rank 0, or the first launched while ranks are not given."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Return this process's rank; before the replicas have met, its place among those that were started."""
        if self.generation.joined:
            return self.generation.group.rank
        return standalone_world()[0] if self.environment is None else self.environment.launch_index

    @property
    def world_size(self) -> int:
        if self.generation.joined:
            return self.generation.group.world_size
        return standalone_world()[1] if self.environment is None else self.environment.replicas

    @property
    def shown_rank(self) -> int:
        """Return the rank for libraries whose first process writes for all; they also ask before ranks are given."""
        # Of those that train, when one joins them, another is the first already.
        return max(self.rank, int(self.generation.is_outside))

    @property
    def passes_do_not_count(self) -> bool:
        """Tell whether what the loop's body does now has no effect on the trial, and takes part in nothing."""
        return self.loops.replaying or self.generation.is_outside

    @property
    def adds_up(self) -> bool:
        """Tell whether this process's counts are its own: processes of one replica may see the same samples."""
        if self.model_parallel.member == 0 or self.models.group_needs.members == 1:
            return True
        return self.position.in_training_loop and self.models.group_needs.slots_per_share == 1

    @property
    def buckets_settled(self) -> bool:
        """Tell whether the models' gradient buckets are in a joiner's order, or nobody will ever join."""
        return self.environment is None or self.position.steps_with_gradients >= DRY_STEPS

    @property
    def progress(self) -> float:
        return self.position.progress

    @property
    def epoch_position(self) -> float:
        """Return the position in epochs and fractions of the present one."""
        return self.position.in_epochs(self.pacing.epoch_size)

    @property
    def adaptation(self) -> Adaptation | None:
        return self.batch.adaptation

    @property
    def loader(self) -> PacingLoader | None:
        return self.pacing.loader

    def together(self, action: Callable[[ReplicaGroup], T], *, otherwise: Callable[[], T] | None = None) -> T:
        return self.rendezvous.do(action, otherwise=otherwise)

    def mean_over_replicas(self, value: float) -> float:
        """Return the mean of a number that every replica has, perhaps its own."""
        return value if self.loops.replaying else self.metric_mean.of(value)

    def raise_postponed(self) -> None:
        self.leaving.raise_postponed()

    def leave_if_asked(self) -> None:
        self.departure.leave_if_asked()

    def was_torn(self, error: BaseException) -> bool:
        return self.model_parallel.was_torn(error)

    def warn(self, message: str) -> None:
        """Write a sentence into the trial's history and its log."""
        self.news.warn(message)

    def close(self) -> None:
        """Send what is queued and stop the threads: the user's code is done. A last checkpoint may be in flight."""
        self.variables.end()
        self.news.flush()
        if self.membership is not None:
            self.membership.stop()
        if self.channel is not None:
            self.channel.close()


class OwnStates(Listener):
    """The replica's own entries in the trial's state, beside those that the user's code registers."""

    def __init__(
        self,
        position: Position,
        habits: LoopHabits,
        registry: StateRegistry,
        others: Mapping[str, Stateful],
    ) -> None:
        self._position = position
        self._habits = habits
        self._registry = registry
        self._others = others

    def register(self) -> None:
        self._registry.register("core", FunctionState(self._save, self._load))
        for name, state in self._others.items():
            self._registry.register(name, state)

    def runs_again(self) -> None:
        self._registry.clear()
        self._position.begin_run()
        self.register()

    def _save(self) -> dict[str, Any]:
        return {**self._position.state_dict(), **self._habits.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._position.load_state_dict(state)
        self._habits.load_state_dict(state)
