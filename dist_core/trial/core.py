"""TrainingCore: what happens between two optimizer steps. One per replica process.

The loader, the wrapped models and the epoch loop report here; the core keeps progress, decides the batch size (on rank
0), switches generations and writes checkpoints. Everything in it runs on the training thread, except the methods that
say otherwise. User code never sees it; ``session`` holds the names it sees.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dist_core.errors import InvalidTraining, JoinAgain, PeerLost, ReplicaExit, RunAgain
from dist_core.generations.decision import (
    ACCUMULATION,
    ATOMIC_BATCH,
    NEXT_ACCUMULATION,
    NEXT_ATOMIC_BATCH,
    NUM_CONTROL_SLOTS,
    ORDER_SQUARES,
    ORDER_SUM,
    PREEMPT_COUNT,
    PREPARED_COUNT,
    PREPARED_SQUARES,
    PREPARED_SUM,
    RATES_SQUARES,
    RATES_SUM,
    Decision,
    all_equal,
    decide_switch,
    fingerprint,
)
from dist_core.generations.letting_go import let_go
from dist_core.generations.process_groups import GroupNeeds, ReplicaGroup, lone_group, torchrun_group
from dist_core.generations.state_transfer import hand_over, share_state
from dist_core.generations.vote import ControlRounds, Round
from dist_core.generations.watch import Membership, Prepared
from dist_core.goodput import GradientStatistics, Hints
from dist_core.gradients.noise.estimator import is_measured
from dist_core.link.client import ControlChannel
from dist_core.link.environment import (
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    ReplicaEnvironment,
    emulated_profile,
    standalone_checkpoint_dir,
    standalone_world,
)
from dist_core.state.packing import pack_copy, unpack
from dist_core.state.random_streams import RandomStreams
from dist_core.state.seeds import seed_all, trial_seed
from dist_core.state.states import FunctionState, StateRegistry
from dist_core.state.trial_checkpoints import TrialCheckpoints
from dist_core.trial.batch_size import Adaptation
from dist_core.trial.emulated_device import EmulatedDevice
from dist_core.trial.memory_limit import is_out_of_memory, lower, read_limit, write_limit
from dist_core.trial.news import News
from dist_core.trial.plain_replica import PlainReplica, begun, end
from dist_core.trial.position import Position
from dist_core.trial.running_sums import NUM_SUM_SLOTS, RunningSums

if TYPE_CHECKING:
    from dist_core.data.loader import AdaptiveDataLoader
    from dist_core.gradients.model import AdaptiveDataParallel
    from dist_core.trial.accumulator import Accumulator
    from dist_core.trial.elastic_world import ElasticWorld

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACCUMULATOR_PREFIX = "accumulator-"
DRY_STEPS = 2
"""Passes a joiner makes alone: they build its gradient buckets in the order that the survivors' have."""
HEAL_SECONDS = 60.0
"""Longest wait for a generation without the lost replica; then the trial resumes from its checkpoint."""
LEAVER_PATIENCE_SECONDS = 3.0
LOSS_PATIENCE_SECONDS = 0.5
"""How long those that are left have to notice a loss by themselves; then what they wait in is broken off."""
NOT_OF_USER_CODE = ("adaptation", "checkpoints")
"""States that go on whatever becomes of what code did."""
MODEL_SLOTS = 3
"""For each model after the core's own slots: two norms, and the way to reduce that rank 0 has chosen, plus 1."""


class TrainingCore:
    def __init__(self, environment: ReplicaEnvironment | None, before: PlainReplica | None = None) -> None:
        """``before``: what stood for this process until now; this one takes its place."""
        self.environment = environment
        self.registry = StateRegistry() if before is None else before.registry
        self.random = RandomStreams()
        self.group: ReplicaGroup = lone_group()
        self.members: tuple[str, ...] = ()
        self.generation = 0
        self.joined = False
        self.joining = False
        self.dry_steps_left = 0
        self.replaying = False
        """A loop's body runs once more without effect: what it reports was reported."""
        self.took_over = False
        """This process has become the one that reports while the trial trained; whoever cares clears it."""
        self._last_rank = 0
        self._asked_at = 0.0
        self.broken: str | None = None
        self.position = Position()
        self._left_loader: AdaptiveDataLoader | None = None
        self.evaluations = 0
        """Evaluation loops that are running."""
        self.trains_in_turns = False
        """Whether the loop's body computes further gradients after an optimizer has stepped, as for a GAN."""
        self._updates = self._updates_before = 0
        """Updates of the present step, by optimizers and schedules; and those it had before a replica was lost in it,
        which count."""
        self._meetings = 0
        """What all replicas have done together since the last step."""
        self.runs = 0
        """How often the user's code has begun again from its top."""
        self._back_behind_loop: _WayBack | None = None
        """To where the code between two training loops began, which runs again from there."""
        self._kept: dict[str, Any] | None = None
        """The states that code which runs again goes on from, until it comes to its epochs."""
        self._kept_batch: tuple[int, int] | None = None
        """The batch that the replicas agree on already, where the code that runs again is to adopt it."""
        self._differing_metrics = False
        self.stream_workers: int | None = None
        """Of the first loader that divides its stream, on the replica that was rank 0 then."""
        self.models: list[AdaptiveDataParallel] = []
        self.loader: AdaptiveDataLoader | None = None
        self.adaptation: Adaptation | None = None
        self.rounds = ControlRounds()
        self._postponed: BaseException | None = None
        self._restored = False
        """Whether this process has looked for a checkpoint of its trial."""
        self._asked_to_leave = False
        self._next_batch: tuple[ReplicaGroup, tuple[int, int]] | None = None
        self.sums = RunningSums()
        replica = None if environment is None else before or PlainReplica(environment)
        self.news = News(None if replica is None else replica.hints)
        folder = standalone_checkpoint_dir() if environment is None else environment.checkpoint_dir
        self.checkpoints = TrialCheckpoints(folder, on_error=self.warn)
        self._memory_limit = read_limit(folder)
        self.channel: ControlChannel | None = None
        self.membership: Membership | None = None
        self._lost: Sequence[str] = ()
        """Members of this generation and the next one of which the scheduler has told that they are gone."""
        self._entering: Prepared | None = None
        profile = emulated_profile()
        self.emulated_device = None if profile is None else EmulatedDevice(profile.params, self.warn)
        if replica is not None:
            self.channel, self.membership = replica.channel, replica.membership
            assert self.membership is not None
            self.membership.group_needs = self.group_needs
            self.membership.on_grace_over = self._say_what_is_lost
            self.membership.on_loss = self._note_loss
            self.membership.hurry()
        self.world: ElasticWorld | None = None
        if folder is not None or environment is not None:
            self._leave_on_signals()
        self._register_own_states()

    def offer_world(self) -> None:
        """Let ``torch.distributed`` work on this trial's replicas, unless the script has set it up for itself."""
        if self.environment is not None and not torch.distributed.is_initialized():
            from dist_core.trial.elastic_world import ElasticWorld

            self.world = ElasticWorld(self, rank=self.environment.launch_index, expected=self.environment.replicas)
            self.world.install()

    def _register_own_states(self) -> None:
        self.registry.register("core", FunctionState(self._save, self._load))
        self.registry.register("random", self.random)
        self.registry.register("checkpoints", self.checkpoints)

    def _leave_on_signals(self) -> None:
        """SIGTERM, and the first SIGINT where there is no scheduler, save and leave.

        Not from threads, which may not ask for signals, nor where somebody handles them already.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        membership = self.membership
        if membership is not None:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda *_: membership.told_to_end())
            return

        def leave(*_: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._asked_to_leave = True

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)

    def _say_what_is_lost(self, message: str) -> None:
        self.warn(message)
        self.news.flush()

    @property
    def _must_leave(self) -> bool:
        return self._asked_to_leave or (self.membership is not None and self.membership.must_leave is not None)

    def _forget_user_code(self) -> None:
        self.registry.clear()
        self.sums.clear()
        self.models.clear()
        self.loader = None
        self.adaptation = None
        # The code that runs again builds its models anew: nothing of what the first run had made is settled.
        self.position.forget()
        self.evaluations, self.replaying = 0, False
        self.runs += 1
        self._postponed = self._back_behind_loop = None
        self.rounds.reset()
        self._register_own_states()

    def lower_memory_limit(self, error: BaseException) -> bool:
        """A batch did not fit into memory: note the bound, and whether the user's code may run again from its top.

        Nothing is lost: weights are as of the last complete step. A replica among others leaves instead, and is
        replaced by one that knows the bound. Raises PeerLost for that, and InvalidTraining when no smaller batch is
        allowed.
        """
        if self.adaptation is None or not self.joined:
            return False
        atomic = self.adaptation.atomic_batch
        limit = lower(atomic, self.adaptation.bounds.min_atomic) if self.adaptation.bounds.adaptive else None
        if limit is None:
            raise InvalidTraining(
                f"out of memory with {atomic} examples a pass, and no smaller batch is allowed: {error}. Lower "
                "batch_size, or let it adapt with gradient accumulation: "
                "autoscale_batch_size(..., local_bsz_bounds=(lower, upper), gradient_accumulation=True)"
            ) from error
        self._memory_limit = limit
        write_limit(self.checkpoints.folder, limit)
        self.warn(f"out of memory with {atomic} examples a pass: from now on at most {limit} ({error})")
        if self.group.world_size > 1:
            raise PeerLost(f"out of memory with {atomic} examples a pass; leaving for a replica that uses {limit}")
        return True

    def can_run_again(self, error: BaseException) -> bool:
        """Whether the user's code, which ended with this error, is to run again from its top; made ready for that."""
        if isinstance(error, JoinAgain):
            self.restart_user_code()
        elif isinstance(error, RunAgain):
            adaptation = self.adaptation
            self._go_on_from_top(in_loop=error.in_loop)
            self._kept_batch = None if adaptation is None else (adaptation.atomic_batch, adaptation.accumulation)
        elif is_out_of_memory(error) and self.lower_memory_limit(error):
            # It has left the loop by this very error.
            self._go_on_from_top(in_loop=True)
        else:
            return False
        if self.environment is not None:
            seed_all(trial_seed(self.environment.trial_id))
        return True

    def _go_on_from_top(self, *, in_loop: bool) -> None:
        """The user's code runs again from its top and goes on where the trial stands; it builds all it has anew.

        ``in_loop``: within the training loop that it has left.
        """
        if not self.position.in_training_loop:
            self.go_back_behind_loop()
        if in_loop:
            self.position.go_back_into_loop()
        if in_loop and self._left_loader is not None:
            self._left_loader.cursor.left = False
        self._kept = unpack(*pack_copy(self.sums.own(self.registry.capture())))
        self._forget_user_code()
        self.joining = False

    def free_device_memory(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restart_user_code(self) -> None:
        """The user's code runs again from its top: forget what its first run registered, keep the identity."""
        self._forget_user_code()
        self.joined = self._restored = False
        self.group = lone_group()
        self.broken = None

    # ------------------------------------------------------------------ identity

    @property
    def present(self) -> TrainingCore:
        return self

    @property
    def stands_alone(self) -> bool:
        """Whether there is nobody to do things together with, so far."""
        return not self.joined or self.group.world_size == 1

    @property
    def reports(self) -> bool:
        """Whether this replica speaks for the trial: rank 0, or the first one launched while ranks are not given."""
        if self.joined or self.environment is None:
            return self.group.rank == 0
        return self.environment.launch_index == 0

    def group_needs(self) -> GroupNeeds:
        """Process groups that the models' reductions want in every generation."""
        needs = GroupNeeds()
        for model in self.models:
            needs |= model.group_needs
        return needs

    @property
    def buckets_settled(self) -> bool:
        """Whether the models' gradient buckets are in the order of a joiner's, or nobody will ever join."""
        return self.environment is None or self.position.own_steps >= DRY_STEPS

    @property
    def statistics(self) -> GradientStatistics | None:
        """Of the first model, which decides on the batch size."""
        return self.models[0].statistics if self.models else None

    @property
    def staleness(self) -> int:
        """How many steps replicas may be apart; 0 where they are synchronous."""
        return max((model.staleness for model in self.models), default=0)

    def measures(self, step: int) -> bool:
        """Whether the step of that number measures the noise scale; the same on all replicas."""
        if not self.models or self.models[0].user_accumulates:
            return False
        return is_measured(step, num_replicas=self.group.world_size, every=self.models[0].noise_every)

    @property
    def passes_do_not_count(self) -> bool:
        """Whether what the loop's body does now has no effect on the trial, and takes part in nothing."""
        return self.replaying or (self.joining and not self.joined)

    @property
    def is_between_loops(self) -> bool:
        """Whether the code that runs is that of an epoch, which runs again where the trial is resumed within it."""
        return not (self.position.in_training_loop or self.evaluations or self.replaying)

    def warn(self, message: str) -> None:
        """A sentence for whoever reads this trial's history and its log."""
        self.news.warn(message)

    # ------------------------------------------------------------------ epochs

    @property
    def progress(self) -> float:
        return self.position.progress

    @property
    def epoch_position(self) -> float:
        """Where training stands, in epochs and parts of the present one."""
        return self.position.in_epochs(self._epoch_size)

    @property
    def _epoch_size(self) -> int | None:
        return None if self.loader is None else self.loader.epoch_size

    def start_epochs(self, limit: int) -> None:
        """Entering the epoch loop: find out where the trial stands. Raises ReplicaExit when it is about over."""
        if self.position.in_epoch_loop:
            raise InvalidTraining("remaining_epochs_until() is used inside itself; one epoch loop at a time")
        self.position.limit = limit
        self._adopt_schedules()
        if self._kept is not None:
            self._go_on_from_kept()
        elif not self.joined and not self._restored:
            epoch = self._epoch_to_join()
            self.joining = epoch is not None
            if epoch is not None:
                self.dry_steps_left = DRY_STEPS
                self.position.epoch = epoch
                if self.position.epoch >= limit:
                    raise ReplicaExit("left")
            else:
                self._restore_from_disk()
        self.position.in_epoch_loop = True
        self.begin_between_loops()

    def _adopt_schedules(self) -> None:
        if not self.position.own_steps:
            for model in self.models:
                model.adopt_schedule()

    def _epoch_to_join(self) -> int | None:
        """Where a replica of a trial that trains is to come in; None for one that starts its trial."""
        if self.channel is None:
            return None
        self._asked_at = time.monotonic()
        epoch = self.channel.request("GET", "/position")["epoch"]
        return None if epoch is None else int(epoch)

    def restore_early(self) -> None:
        """Before the epoch loop: from here on each state has its content as soon as it is registered.

        Not of a joiner, which hears from the others when it comes to train.
        """
        if self._kept is not None:
            # Code that draws before its epochs draws alike on all replicas.
            drawn = {"random": self._kept.pop("random")} if "random" in self._kept else {}
            self._go_on_from_kept()
            self._kept = drawn
        elif not self.joined and not self._restored and self._epoch_to_join() is None:
            self._restore_from_disk()

    def _go_on_from_kept(self) -> None:
        assert self._kept is not None
        self.registry.restore(self._kept)
        self._kept = None

    def postpone(self, error: BaseException) -> None:
        """Keep what was raised where Python would swallow it (a generator being closed); raised at the next chance."""
        self._postponed = self._postponed or error

    def raise_postponed(self) -> None:
        error, self._postponed = self._postponed, None
        if error is not None:
            raise error

    def end_epoch(self) -> None:
        self.raise_postponed()
        if self.loader is not None:
            self.loader.complete_step(self)
        if self.sums and self.joined:
            # What was added to them in this epoch cannot be added again in the next one.
            self._settle_sums()
        of_this_epoch = f"{ACCUMULATOR_PREFIX}{self.position.epoch}-"
        self.registry.forget(of_this_epoch)
        self.sums.end_epoch(of_this_epoch)
        self.position.end_epoch(self._epoch_size)
        self._meetings = 0
        self._left_loader = None
        self.news.epoch_ends()
        self._maybe_checkpoint()
        self.begin_between_loops()

    def leave_epochs(self) -> None:
        self.position.in_epoch_loop = False

    def begin_training_loop(self) -> bool:
        """A training loop starts; False for one that the trial has completed in this epoch before it was resumed."""
        if self.position.in_training_loop:
            raise InvalidTraining(
                "a training loop over an AdaptiveDataLoader starts while another one runs; iterate them one after "
                "another, or join their datasets (torch.utils.data.StackDataset gives pairs of samples)"
            )
        self._left_loader = None
        begins = self.position.begin_loop()
        if begins:
            self._back_behind_loop = None
        else:
            self.begin_between_loops()
        return begins

    def leave_training_loop_early(self, loader: AdaptiveDataLoader, *, has_trained: bool) -> None:
        self._left_loader = loader
        self.position.leave_loop_early(has_trained=has_trained)

    # ------------------------------------------------------------------ code that runs again

    @property
    def stands_behind_next_loop(self) -> bool:
        """Whether the trial was resumed within the training loop that this process comes to, or behind it."""
        return not self.joining and self.position.is_behind_next_loop

    def begin_between_loops(self) -> None:
        """From here on code does all again where the trial leaves, or loses a replica, before its next loop."""
        self.position.has_evaluated = False
        self.sums.mark()
        if (self.joined or self.position.is_resumed) and self.checkpoints.folder is not None:
            self._back_behind_loop = _WayBack(
                undo=self.remember(leave_out=(*NOT_OF_USER_CODE, ACCUMULATOR_PREFIX)),
                weights=self._fingerprint_of_weights(),
            )

    def go_on_behind_loop(self) -> None:
        """Code has left a loop, and goes on. Raises what it could not hear of then."""
        self.raise_postponed()
        if not self.position.in_training_loop:
            self.position.stay_out_of_loop()
            self._left_loader = None

    @property
    def _can_go_back(self) -> bool:
        """Whether what code has done since the last training loop can be undone: weights are not kept twice.

        Who swaps them for an evaluation (averages, the best so far, optimizers that move them) says so elsewhere too.
        """
        return self._back_behind_loop is None or self._back_behind_loop.weights == self._fingerprint_of_weights()

    def _fingerprint_of_weights(self) -> str:
        """Of their number and norm; as text, in which a norm that is no number equals itself."""
        trained = [each.detach() for model in self.models for each in model.module.parameters() if each.requires_grad]
        return f"{len(trained)} {float(torch.nn.utils.get_total_norm(trained)) if trained else 0.0!r}"

    def go_back_behind_loop(self) -> None:
        """Undo what code has done since the last training loop. Sums that it was shown stay as they are."""
        if self._back_behind_loop is not None and self._can_go_back:
            self._back_behind_loop.undo()
        self.sums.take_back()

    # ------------------------------------------------------------------ joining

    def adopt_loader(self, loader: AdaptiveDataLoader) -> None:
        """The first loader that trains drives batch size and progress.

        One that is made anew each epoch takes its predecessor's place.
        """
        if (
            self.loader is not None
            and self.loader is not loader
            and self.position.in_epoch_loop
            and self.position.loops_begun == 0
        ):
            loader.take_over(self.loader)
            self.loader = loader
        elif self.loader is None:
            self.loader = loader
            self.adaptation = Adaptation(
                loader.bounds,
                lambda: self.statistics,
                node_kind="" if self.environment is None else self.environment.node_kind,
            )
            self.registry.register("adaptation", self.adaptation)
            if loader.bounds.adaptive and self.staleness:
                raise InvalidTraining(
                    "parameter_server trains with a fixed batch size, because statistics of gradients assume "
                    "synchronous steps; leave out autoscale_batch_size, or choose another reduction"
                )
            if self.trains_in_turns:
                self.adaptation.forbid_accumulation()
            if self._kept_batch is not None:
                if self.memory_limit is not None:
                    self.adaptation.limit(self.memory_limit)
                self.adaptation.use(*self._kept_batch)
                self._kept_batch = None
            elif self.joined:
                self._agree_on_batch()

    def join(self) -> None:
        """Enter the first generation; returns with equal state on all ranks. Raises JoinAgain, ReplicaExit."""
        if self.environment is None:
            self._join_standalone()
            return
        assert self.channel is not None and self.membership is not None
        came_in = time.monotonic() - self._asked_at if self.joining else None
        self.channel.request(
            "POST", "/ready", {"join_epoch": self.position.epoch if self.joining else None, "seconds": came_in}
        )
        while True:
            prepared = self.membership.wait_for_first()
            if prepared is None:
                raise JoinAgain
            if prepared.group is None:
                raise ReplicaExit("left")
            if not self.joining or prepared.generation.join_epoch == self.position.epoch:
                break
            # Offered for an epoch this joiner no longer stands in: not entering makes the survivors stay as they are.
            self.membership.abandon(prepared.generation.number)
            prepared.group.break_off()
        try:
            with self._meeting(prepared):
                if self.joining:
                    received = self._share_state(prepared.group)
                else:
                    received = hand_over(prepared.group, self.registry.capture() if prepared.group.rank == 0 else None)
        except PeerLost as error:
            self.membership.abandon(prepared.generation.number)
            raise JoinAgain from error
        if prepared.group.rank != 0:
            epoch = self.position.epoch
            self.registry.restore(received)
            if self.position.epoch != epoch:
                raise PeerLost(f"joined in epoch {self.position.epoch} while standing in epoch {epoch}")
        # A joiner's batch size came with the state.
        self._enter(prepared, agree=not self.joining)
        if prepared.group.rank == 0:
            self.news.announce("/switched", {"generation": prepared.generation.number})

    def _join_standalone(self) -> None:
        self._adopt_schedules()
        rank, world_size = standalone_world()
        if world_size > 1:
            self.group = torchrun_group(rank, world_size, self.group_needs())
            received = hand_over(self.group, self.registry.capture() if rank == 0 else None)
            if rank != 0:
                self.registry.restore(received)
        self.joined = True
        self.random.enter(rank, 0)
        self.checkpoints.training_begins()
        self._use_group()

    def _enter(self, prepared: Prepared, *, agree: bool = True) -> None:
        assert prepared.group is not None and self.membership is not None
        self.took_over |= self._last_rank > 0 and prepared.group.rank == 0
        self._last_rank = prepared.group.rank
        let_go(self.group.process_groups())
        self.group = prepared.group
        self.members = prepared.generation.members
        self.generation = prepared.generation.number
        self.joined = True
        self.broken = None
        self.random.enter(self.group.rank, self.generation)
        if self.emulated_device is not None:
            self.emulated_device.begin_anew()
        if self.world is not None:
            self.world.install()
        self.news.training_goes_on()
        self.checkpoints.training_begins()
        self.membership.commit(prepared)
        self._use_group(agree=agree)

    def _use_group(self, *, agree: bool = True) -> None:
        for model in self.models:
            model.use_group(self.group)
        if agree:
            self._agree_on_batch()

    def _agree_on_batch(self) -> None:
        if self.adaptation is None:
            return
        limit = self.memory_limit
        if limit is not None:
            self.adaptation.limit(limit)
        mine = self.adaptation.choose(self.group.num_nodes, self.group.world_size, switching=True)
        try:
            atomic, accumulation = self.group.broadcast_json(list(mine))
        except PeerLost as error:
            self.mark_broken(str(error))
            return
        self.adaptation.use(atomic, accumulation)

    def adopt_accumulator(self, accumulator: Accumulator) -> None:
        """Its sums are part of the trial's state; one made within an epoch is so until the epoch ends."""
        name = (
            f"{ACCUMULATOR_PREFIX}{self.position.epoch}" if self.position.in_epoch_loop else f"{ACCUMULATOR_PREFIX}all"
        )
        name = self.registry.unique_name(name)
        self.registry.register(name, accumulator)
        self.sums.adopt(name, accumulator)

    def _settle_sums(self) -> None:
        """What every replica has added is summed: before some of this generation leave, or under keys that are new."""
        self.sums.settle(self.note_meeting)

    def note_meeting(self) -> None:
        self._meetings += 1

    # ------------------------------------------------------------------ one step

    def launch_control(self) -> None:
        """Start the per-step control reduction; called when a step's first gradients are reduced."""
        try:
            self.rounds.launch(self._compose_control, self.group)
        except RuntimeError as error:
            self.mark_broken(str(error))

    def _compose_control(self) -> tuple[torch.Tensor, Prepared | None]:
        vector = torch.zeros(self._first_sum_slot + NUM_SUM_SLOTS, dtype=torch.float64)
        prepared = self.membership.pending() if self.membership is not None else None
        if prepared is not None and self._may_advertise(prepared):
            number = float(prepared.generation.number)
            vector[PREPARED_COUNT], vector[PREPARED_SUM], vector[PREPARED_SQUARES] = 1.0, number, number**2
        if self._must_leave:
            vector[PREEMPT_COUNT] = 1.0
        if self.group.rank == 0 and self.adaptation is not None:
            proposal = self.adaptation.proposal(self.group.num_nodes, self.group.world_size)
            if proposal is not None:
                vector[ATOMIC_BATCH], vector[ACCUMULATION] = proposal
            if prepared is not None and prepared.group is not None:
                vector[NEXT_ATOMIC_BATCH], vector[NEXT_ACCUMULATION] = self._batch_for(prepared.group)
        order = 0.0 if self.loader is None else float(self.loader.order_fingerprint)
        rates = float(fingerprint([rate for model in self.models for rate in model.rates()]))
        vector[ORDER_SUM], vector[ORDER_SQUARES] = order, order**2
        vector[RATES_SUM], vector[RATES_SQUARES] = rates, rates**2
        for slot, model in self._model_slots():
            vector[slot], vector[slot + 1] = model.norms_to_sum()
            if self.group.rank == 0 and model.tuning_proposal is not None:
                vector[slot + 2] = model.tuning_proposal + 1.0
        if self.group.world_size > 1 and not self.staleness:
            vector[self._first_sum_slot :] = torch.tensor(self.sums.send(), dtype=torch.float64)
        return vector, prepared

    def _batch_for(self, group: ReplicaGroup) -> tuple[int, int]:
        """The batch for a generation that is prepared; worked out once, because it is asked for at every step."""
        assert self.adaptation is not None
        if self._next_batch is None or self._next_batch[0] is not group:
            chosen = self.adaptation.choose(group.num_nodes, group.world_size, switching=True)
            self._next_batch = (group, chosen)
        return self._next_batch[1]

    @property
    def _first_sum_slot(self) -> int:
        return NUM_CONTROL_SLOTS + MODEL_SLOTS * len(self.models)

    def _model_slots(self) -> Iterator[tuple[int, AdaptiveDataParallel]]:
        for index, model in enumerate(self.models):
            yield NUM_CONTROL_SLOTS + MODEL_SLOTS * index, model

    def _may_advertise(self, prepared: Prepared) -> bool:
        """A joiner's gradient buckets are as after two passes; ours must be too before it is let in."""
        joiners = set(prepared.generation.members) - set(self.members)
        # A joiner stands in its epoch's first loop.
        return not joiners or (self.position.own_steps >= DRY_STEPS and self.position.is_first_loop)

    def mark_broken(self, reason: str) -> None:
        """A collective failed: this step does not count. Safe from any thread."""
        if self.broken is None:
            self.broken = reason

    def finish_step(self, loader: AdaptiveDataLoader, global_batch: int) -> None:
        """The body of the loop has run for the last micro-batch of a step: count it, then act on what was agreed."""
        assert self.adaptation is not None
        self.launch_control()
        lag = self.staleness if self.group.world_size > 1 else 0
        agreed: Round | None = None
        try:
            agreed = self.rounds.finish(lag)
        except RuntimeError as error:
            self.mark_broken(str(error))
        if self.broken is not None:
            self._heal()
            return
        self._updates = self._updates_before = self._meetings = 0
        self.sums.keep()
        if agreed is not None and not lag:
            self._refuse_what_differs(agreed.vector)
            if self.group.world_size > 1 and self.sums.receive(
                agreed.vector[self._first_sum_slot :].tolist(), self.group.world_size
            ):
                self._settle_sums()
        self.position.schedule_position += self._step_gain()
        if loader is self.loader and (self.position.is_first_loop or not self.position.in_epoch_loop):
            # An epoch that passes over its data twice is not two.
            self.position.progress += self.adaptation.progress_of(global_batch)
        values = [0.0] * self._first_sum_slot
        if agreed is not None:
            values = agreed.vector.tolist()
        for slot, model in self._model_slots():
            model.end_step()
            model.take_norms(values[slot], values[slot + 1])
            model.tune(round(values[slot + 2]) - 1 if values[slot + 2] else None)
        self.position.steps += 1
        self.position.own_steps += 1
        loader.commit(global_batch)
        if values[ATOMIC_BATCH] > 0:
            self.adaptation.use(int(values[ATOMIC_BATCH]), int(values[ACCUMULATION]))
        if values[PREEMPT_COUNT] > 0:
            self._settle_sums()
            self._save_and_exit("preempted", EXIT_PREEMPTED)
        if agreed is not None and agreed.prepared is not None:
            self._maybe_switch(agreed.prepared, values)
        self._maybe_checkpoint()
        if self.group.rank == 0:
            self.news.hint(self.hints, self.generation)

    def _refuse_what_differs(self, vector: torch.Tensor) -> None:
        """Replicas that train on other samples or at other rates than the rest train another model, without a word."""
        values, size = vector.tolist(), self.group.world_size
        if not all_equal(values[ORDER_SUM], values[ORDER_SQUARES], size):
            raise InvalidTraining(
                "the replicas stand at different places of the data, so that samples would be trained twice or never. "
                "Either the sampler draws another order on each: let it draw from torch's, NumPy's or Python's global "
                "generator, or from a torch.Generator in its attribute `generator`, which are seeded alike. Or one of "
                "them has left its training loop by a count or a condition of its own: let the loop run to its end"
            )
        if not all_equal(values[RATES_SUM], values[RATES_SQUARES], size):
            raise InvalidTraining(
                "the learning rates differ between the replicas. Something sets them from what only one replica "
                "knows, such as its own part of a metric: sum it with an Accumulator first, or use a schedule of "
                "torch's, whose metric is agreed on"
            )

    def _step_gain(self) -> float:
        return self.models[0].gain if self.models else 1.0

    def scheduler_steps_due(self) -> int:
        """How often a learning rate scheduler moves on in the present step: as often as small steps would have."""
        before = self.position.schedule_position + 1e-9
        return math.floor(before + self._step_gain()) - math.floor(before)

    def note_user_accumulation(self) -> None:
        """The user's loop sums gradients over batches itself: ours must be one pass each."""
        if self.adaptation is not None:
            self.adaptation.forbid_accumulation()

    def await_control(self) -> bool:
        """Wait for the control reduction of this step; False when the step is broken and must not be applied.

        The optimizer waits here before it steps: a step counts on all replicas, or on none.
        """
        if self.broken is None:
            try:
                self.rounds.wait()
            except RuntimeError as error:
                self.mark_broken(str(error))
        return self.broken is None

    def note_forward(self) -> None:
        """A model computes within a step. Raises InvalidTraining where that step cannot be what it should be."""
        if self.trains_in_turns or not any(model.passed_step for model in self.models):
            return
        if any(model.is_in_a_part for model in self.models):
            raise InvalidTraining(
                "the training loop computes with a model after an optimizer has stepped, as for a GAN, but this step "
                "takes several passes, of which only the last one applies updates: what comes after them would see "
                "the old weights. Allow a whole batch at once: leave out gradient_accumulation, and raise the upper "
                "bound of local_bsz_bounds to batch_size"
            )
        self.trains_in_turns = True
        if self.adaptation is not None:
            self.adaptation.forbid_accumulation()

    def counts_update(self) -> bool:
        """Whether the update by an optimizer or a schedule that is about to be made is still to be made.

        A replica may be lost between two of them in one step. Then the body runs again, and the updates that were made
        on all survivors are not made a second time.
        """
        self._updates += 1
        return self._updates > self._updates_before

    @property
    def has_made_next_update(self) -> bool:
        return self._updates < self._updates_before

    def before_update(self) -> None:
        """An optimizer is about to change weights: a checkpoint of them has to be copied by then."""
        self.checkpoints.settle()

    def _drain_control(self) -> None:
        """Asynchronous replicas come to the same point: all steps so far are made by all."""
        try:
            self.rounds.drain()
        except RuntimeError as error:
            self.mark_broken(str(error))

    def _maybe_switch(self, prepared: Prepared, values: Sequence[float]) -> None:
        decision = decide_switch(
            count=values[PREPARED_COUNT],
            total=values[PREPARED_SUM],
            squares=values[PREPARED_SQUARES],
            world_size=self.group.world_size,
            pending=prepared.generation,
            epoch=self.position.epoch,
        )
        if decision is Decision.STAY:
            return
        if decision is Decision.ABANDON:
            self._abandon(prepared)
            return
        self._next_batch = None
        self._switch(prepared, (int(values[NEXT_ATOMIC_BATCH]), int(values[NEXT_ACCUMULATION])))

    def _abandon(self, prepared: Prepared) -> None:
        """Stay in the present generation; dropping the other group tells its joiners."""
        assert self.membership is not None
        self.membership.abandon(prepared.generation.number)
        self._next_batch = None
        if self.group.rank == 0:
            self.news.announce("/abandoned", {"generation": prepared.generation.number})

    def _switch(self, prepared: Prepared, batch: tuple[int, int]) -> None:
        started = time.perf_counter()
        self._drain_control()
        self._settle_sums()
        if prepared.group is None:
            if not prepared.generation.members:
                self._save_and_exit("paused", 0)
            self._make_way()
            self.news.flush()
            raise ReplicaExit("left")
        if self.adaptation is not None and batch[0]:
            # Before the state is handed over: it goes to the joiners with it.
            self.adaptation.use(*batch)
        joiners = [rank for rank, name in enumerate(prepared.generation.members) if name not in self.members]
        if joiners:
            received: dict[str, Any] | None = None
            try:
                with self._meeting(prepared):
                    received = self._share_state(prepared.group, joiners)
            except PeerLost as error:
                logger.warning("switch given up generation=%d error=%s", prepared.generation.number, error)
            if not self._all_of_us(received is not None):
                # A joiner died at the last moment. The group that trains is whole: all stay in it.
                self._abandon(prepared)
                self._agree_on_batch()
                return
            if prepared.group.rank != 0 and received is not None:
                self.before_update()
                self.registry.restore(received)
        self._enter(prepared, agree=False)
        self._note_pause(prepared, time.perf_counter() - started)

    def _make_way(self) -> None:
        """What is left to do here is to end; survivors may want this core at once."""
        with contextlib.suppress(OSError):
            os.nice(19)

    def _share_state(self, group: ReplicaGroup, joiners: Sequence[int] = ()) -> dict[str, Any]:
        return share_state(group, self.registry.capture(), joiners=joiners, is_replicated=self._changed_by_optimizers())

    def _all_of_us(self, succeeded: bool) -> bool:
        """Vote in the present generation: whether something succeeded on every one of its replicas."""
        votes = torch.tensor([float(succeeded)], dtype=torch.float64)
        try:
            self.group.sum(votes, what="votes")
        except PeerLost as error:
            self.mark_broken(str(error))
            return False
        return round(float(votes)) == self.group.world_size

    def _heal(self, *, in_step: bool = True) -> None:
        """Another replica vanished: wait for the generation without it and go on from the furthest survivor.

        Possible at a step boundary of the epoch everybody is in; elsewhere PeerLost ends this replica and the trial
        resumes from its checkpoint. Raises RunAgain where the lost one has taken a part of an evaluation with it.
        """
        reason = self.broken or "a collective failed"
        if in_step:
            self.sums.take_back()
        if self.membership is None or self.channel is None:
            raise PeerLost(f"another replica vanished: {reason}")
        started = time.perf_counter()
        self._drop_group()
        self.news.announce("/broken", {"generation": self.generation})
        while time.perf_counter() - started < HEAL_SECONDS and self.membership.must_leave is None:
            prepared = self.membership.pending()
            if prepared is not None and self._may_heal_with(prepared, time.perf_counter() - started):
                if prepared.group is None:
                    break
                try:
                    with self._meeting(prepared):
                        runs_again = self._rejoin(prepared)
                except PeerLost:
                    # One of these is gone as well; the scheduler sees it and publishes again.
                    prepared.group.break_off()
                    self.membership.abandon(prepared.generation.number)
                    continue
                self._note_pause(prepared, time.perf_counter() - started)
                if runs_again:
                    self.warn(
                        "a replica was lost in an evaluation, and what it had seen of it: the training code runs again "
                        "from its top and evaluates anew with the others"
                    )
                    raise RunAgain
                return
            time.sleep(0.005)
        raise PeerLost(f"another replica vanished and the trial was not rebuilt around it: {reason}")

    def _note_loss(self, lost: Sequence[str]) -> None:
        """From the scheduler, who may know before a collective does. Called from another thread."""
        self._lost = lost
        self._break_off_if_lost(self.members, self.group)
        entering = self._entering
        if entering is not None and entering.group is not None:
            self._break_off_if_lost(entering.generation.members, entering.group)

    @contextlib.contextmanager
    def _meeting(self, prepared: Prepared) -> Iterator[None]:
        """While the members of a generation hand over state before they enter it: the loss of one ends that, too."""
        assert prepared.group is not None
        self._entering = prepared
        self._break_off_if_lost(prepared.generation.members, prepared.group)
        try:
            yield
        finally:
            self._entering = None

    def _break_off_if_lost(self, members: Sequence[str], group: ReplicaGroup) -> None:
        if set(self._lost).isdisjoint(members):
            return

        def break_off() -> None:
            time.sleep(LOSS_PATIENCE_SECONDS)
            entering = self._entering
            if self.group is group or (entering is not None and entering.group is group):
                group.break_off()

        threading.Thread(target=break_off, name="elastune-loss", daemon=True).start()

    def _drop_group(self) -> None:
        """Close this replica's connections: others that still wait for it in a collective learn of the loss by that."""
        self.group.break_off()
        self.rounds.reset()
        self.group = lone_group(self.group_needs())
        for model in self.models:
            model.use_group(self.group)
            model.drop_gradients()

    def _may_heal_with(self, prepared: Prepared, waited_seconds: float) -> bool:
        if prepared.group is None:
            # Told to leave by a generation that may hold the lost replica: give the one that replaces it a moment.
            return not prepared.generation.members or waited_seconds > LEAVER_PATIENCE_SECONDS
        return set(prepared.generation.members) <= set(self.members)

    def _note_pause(self, prepared: Prepared, seconds: float) -> None:
        self.news.note_pause(seconds)
        if self.group.rank == 0:
            self.news.announce("/switched", {"generation": prepared.generation.number})

    def _rejoin(self, prepared: Prepared) -> bool:
        """Whether the epoch's code has to run again from behind its last training loop."""
        group = prepared.group
        assert group is not None
        mine = _Standing(
            steps=self.position.steps,
            updates=max(self._updates, self._updates_before),
            epoch=self.position.epoch,
            meetings=self._meetings,
            # A server of parameters would begin again with those of the code's own beginning.
            has_evaluated=self.position.has_evaluated
            and self.position.in_epoch_loop
            and self._can_go_back
            and not self.staleness,
        )
        standing = [_Standing(**each) for each in group.gather_json(asdict(mine))]
        # The lost replica may have completed its last collective with some of us and not with others: those are one
        # step ahead, or one update, and that counts.
        furthest = max(range(group.world_size), key=lambda rank: (standing[rank].steps, standing[rank].updates, -rank))
        if not all(each.can_go_on_from(standing[furthest]) for each in standing):
            self.warn(
                "a replica was lost while the others stood at different places outside of a training step; the trial "
                "goes on from its last checkpoint"
            )
            self.news.flush()
            raise ReplicaExit("survivors stand at different places", EXIT_PEER_LOST)
        runs_again = any(each.has_evaluated for each in standing)
        if runs_again and not self.position.in_training_loop:
            self.go_back_behind_loop()
            self._back_behind_loop = None
            # Also where this group loses one before it trains.
            self.position.has_evaluated = True
        received = hand_over(group, self.registry.capture() if group.rank == furthest else None, source=furthest)
        if group.rank != furthest:
            self.before_update()
            # What each has added since the sums were made is its own.
            if standing[group.rank].steps < standing[furthest].steps:
                self.sums.catch_up(received)
            self.registry.restore(
                {name: value for name, value in received.items() if not name.startswith(ACCUMULATOR_PREFIX)}
            )
        self._updates_before, self._updates = standing[furthest].updates, 0
        self._enter(prepared)
        return runs_again

    # ------------------------------------------------------------------ what replicas do together outside of steps

    def together(self, action: Callable[[ReplicaGroup], T], *, otherwise: Callable[[], T] | None = None) -> T:
        """The result of what all replicas do at this place of their code; of those that are left if one is lost.

        Within a training loop a step is under way that does not count then: its body runs again, and here it goes on
        with ``otherwise``. Raises PeerLost there if nothing is given, and RunAgain as `_heal` does.
        """
        if not self.position.in_training_loop:
            self.raise_postponed()
        while True:
            try:
                if self.broken is not None:
                    raise PeerLost(self.broken)
                result = action(self.group)
                self._meetings += not self.position.in_training_loop
                return result
            except PeerLost as error:
                if not self.joined or (self.position.in_training_loop and otherwise is None):
                    raise
                self.mark_broken(str(error))
            if self.position.in_training_loop and otherwise is not None:
                return otherwise()
            self._heal(in_step=False)
            lacks = ". Sums of an evaluation lack what that one had seen" if self.position.has_evaluated else ""
            self.warn(f"a replica was lost outside of the training loop; the others go on without it{lacks}")

    def note_stream_workers(self, number: int) -> None:
        """A stream is divided by its loader's workers, which may be more on one machine than on another."""
        if self.stream_workers is None:
            self.stream_workers = number

    def sum_between_steps(self, values: Sequence[float]) -> list[float] | None:
        """Sums over all replicas; None if one was lost, and the others have rebuilt the trial without it."""
        vector = torch.tensor(values, dtype=torch.float64)
        try:
            if self.broken is not None:
                raise PeerLost(self.broken)
            self.group.sum(vector, what="samples of a step")
        except PeerLost as error:
            self.mark_broken(str(error))
            self._heal()
            return None
        found: list[float] = vector.tolist()
        return found

    def mean_over_replicas(self, value: float) -> float:
        """Of a number that every replica has, perhaps its own; exactly that number if it is the same everywhere.

        The number itself where a replica is lost within a step, which is broken then.
        """
        if self.group.world_size == 1 or not self.joined or self.replaying:
            return value

        def gather(group: ReplicaGroup) -> list[float]:
            values = torch.zeros(group.world_size, dtype=torch.float64)
            values[group.rank] = value
            group.sum(values, what="metrics")
            return [float(each) for each in values]

        values = self.together(gather, otherwise=lambda: [value])
        if len(set(values)) == 1:
            return value
        if not self._differing_metrics:
            self._differing_metrics = True
            self.warn(
                f"a schedule was given another metric on each replica ({', '.join(f'{each:.6g}' for each in values)}): "
                "it follows their mean. Sum the metric with an Accumulator to have that of all samples"
            )
        return math.fsum(values) / len(values)

    # ------------------------------------------------------------------ state and reports

    def end_training_loop(self) -> None:
        """A pass of the training loader is over: buffers (running statistics) become rank 0's everywhere."""
        self.position.leave_loop()
        self._drain_control()
        for model in self.models:
            model.end_training_loop()
        if self.staleness and self.group.world_size > 1 and self.broken is None:
            # Whoever keeps the weights may not go before all have fetched them.
            self._all_of_us(True)
        if self.group.world_size > 1 and self.broken is None:
            buffers = [buffer for model in self.models for buffer in model.module.buffers()]
            if buffers and all(buffer.device.type == "cpu" for buffer in buffers):
                self.together(lambda group: group.broadcast_tensors(buffers))
            self._settle_sums()
        self.begin_between_loops()

    def _save(self) -> dict[str, Any]:
        return {
            **self.position.state_dict(),
            "trains_in_turns": self.trains_in_turns,
            "stream_workers": self.stream_workers,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.position.load_state_dict(state)
        self.trains_in_turns = state["trains_in_turns"]
        self.stream_workers = state.get("stream_workers") or self.stream_workers

    @property
    def memory_limit(self) -> int | None:
        """Most examples of a pass, once a larger one has run out of memory."""
        return read_limit(self.checkpoints.folder) or self._memory_limit

    def remember(self, *, leave_out: tuple[str, ...] = ()) -> Callable[[], None]:
        """A way back to the present state from what code does whose optimizers make no step.

        ``leave_out``: how the names of states begin that stay as they will be then.
        """
        states = self.sums.own(self.registry.capture())
        remembered = {name: state for name, state in states.items() if not name.startswith(leave_out)}
        skeleton, kept = pack_copy(remembered, self._changed_by_optimizers())
        return lambda: self.registry.restore(unpack(skeleton, kept))

    def _restore_from_disk(self) -> None:
        self._restored = True
        state = self.checkpoints.load_newest()
        if state is not None:
            self.registry.restore(state)

    def _maybe_checkpoint(self) -> None:
        if self.group.rank == 0 and self.joined and not self.position.is_past_the_end and self.checkpoints.is_due:
            self.checkpoint(leaving=False)

    def checkpoint(self, *, leaving: bool, wait: bool = False) -> None:
        """Write all registered states; rank 0 only."""
        self.checkpoints.save(
            self.registry.capture(),
            {
                "epoch": self.position.epoch,
                "steps": self.position.steps,
                "progress": self.position.progress,
                "generation": self.generation,
            },
            leaving=leaving,
            wait=wait,
            keeps=self._changed_by_optimizers(),
        )

    def _changed_by_optimizers(self) -> Callable[[torch.Tensor], bool]:
        """Whether a tensor is one that only optimizers change: the same on all replicas between steps."""
        addresses = {tensor.data_ptr() for model in self.models for tensor in model.replicated_tensors()}
        return lambda tensor: tensor.data_ptr() in addresses

    def _save_and_exit(self, reason: str, code: int) -> None:
        self._drain_control()
        if not self.position.in_training_loop:
            self.go_back_behind_loop()
        if self.group.rank == 0 and self.joined and not self.position.is_past_the_end:
            if self.membership is not None:
                self.membership.saving = True
            self.checkpoint(leaving=True)
        self.news.flush()
        raise ReplicaExit(reason, code)

    def leave_if_asked(self) -> None:
        """Outside the step loop (while waiting for an answer): leave with a checkpoint when asked to."""
        if self._must_leave:
            self._save_and_exit("preempted", EXIT_PREEMPTED)
        if self._is_paused:
            self._save_and_exit("paused", 0)

    @property
    def _is_paused(self) -> bool:
        """Whether the next generation has no members."""
        pending = None if self.membership is None else self.membership.pending()
        return pending is not None and not pending.generation.members

    def leave_evaluation_if_asked(self) -> None:
        """Between two batches of an evaluation, which runs from its beginning when the trial goes on."""
        if not self.position.in_training_loop:
            self.leave_if_asked()

    def hints(self) -> Hints | None:
        if self.adaptation is None or self.loader is None:
            return None
        per_epoch = self._epoch_size
        fraction = self.position.fraction_of_epoch(per_epoch)
        target = None if self.position.limit is None or per_epoch is None else float(self.position.limit * per_epoch)
        return Hints(
            bounds=self.adaptation.bounds,
            observations=tuple(self.adaptation.profile.observations()),
            statistics=self.statistics,
            progress=self.position.progress,
            target_progress=target,
            epoch=self.position.epoch,
            epoch_fraction=fraction,
            epoch_seconds=self.news.typical_epoch_seconds(fraction),
            global_batch=self.adaptation.global_batch(self.group.world_size),
            goodput=self.adaptation.measured_goodput,
            rescale_pause_seconds=self.news.typical_pause,
        )

    def close(self) -> None:
        """The user's code is done: send what is queued and stop the threads. A last checkpoint may be in flight."""
        self.news.flush()
        if self.membership is not None:
            self.membership.stop()
        if self.channel is not None:
            self.channel.close()


@dataclass(frozen=True, slots=True)
class _WayBack:
    undo: Callable[[], None]
    weights: str
    """A fingerprint of those that are trained, as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """Where a replica stands when another one is lost."""

    steps: int
    updates: int
    epoch: int
    meetings: int
    has_evaluated: bool

    def can_go_on_from(self, furthest: _Standing) -> bool:
        """Whether this replica comes to where the furthest is by doing what is left of its step."""
        behind = self.steps < furthest.steps
        return self.epoch == furthest.epoch and (
            furthest.meetings == 0 if behind else self.meetings == furthest.meetings
        )


_core: TrainingCore | None = None


def get_core() -> TrainingCore:
    """The core of this process, made on first use."""
    global _core
    if _core is None:
        before = begun()
        _core = TrainingCore(ReplicaEnvironment.from_environ(), before)
        if before is not None:
            before.successor = _core
        _core.offer_world()
    return _core


def reset_core() -> None:
    """Forget the core; for a process that trains several things one after another, and for tests."""
    global _core
    if _core is not None:
        _core.close()
        if _core.world is not None:
            _core.world.remove()
    _core = None
    end()
