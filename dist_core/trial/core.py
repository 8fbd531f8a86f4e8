"""TrainingCore: one replica of a trial, as the process's other code sees it. One per replica process.

The loader, the wrapped models and the epoch loop report here, to the pieces that it is made of. Everything runs on the
training thread, except the methods that say otherwise. User code never sees it; ``training`` holds the names it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from dist_core.data.batch_size import Adaptation
from dist_core.device import release_cached_memory
from dist_core.generations.generation import DRY_STEPS
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.link.environment import standalone_world
from dist_core.state.seeds import seed_all, trial_seed
from dist_core.trial.elastic_world import ElasticWorld
from dist_core.trial.participants import PacingLoader
from dist_core.trial.pieces import Pieces

T = TypeVar("T")


class TrainingCore(Pieces):
    def offer_world(self) -> None:
        """Let ``torch.distributed`` work on this trial's replicas, unless the script has set it up for itself."""
        if self.environment is not None and not torch.distributed.is_initialized():
            self.world = ElasticWorld(
                self.generation,
                self.position,
                self.rendezvous,
                rank=self.environment.launch_index,
                expected=self.environment.replicas,
                takes_part=lambda: not self.passes_do_not_count,
            )
            self.world.install()
            self.transitions.on_enter.append(self.world.install)

    # ------------------------------------------------------------------ code that runs again

    def can_run_again(self, error: BaseException) -> bool:
        """Tell whether the user's code, which ended with this error, is to run again; made ready for that."""
        ready = self.rerun.is_made_ready(error)
        if ready and self.environment is not None:
            seed_all(trial_seed(self.environment.trial_id))
        return ready

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
        """Tell whether this replica speaks for the trial: rank 0, or the first launched while ranks are not given."""
        if self.generation.joined or self.environment is None:
            return self.generation.group.rank == 0
        return self.environment.launch_index == 0

    @property
    def shown_rank(self) -> int:
        """Return the rank for libraries whose first process writes for all; they also ask before ranks are given."""
        if self.generation.joined:
            return int(self.generation.group.rank)
        if self.environment is None:
            return standalone_world()[0]
        # Of those that train, when one joins them, another is the first already.
        return max(self.environment.launch_index, int(self.generation.is_outside))

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
        return value if self.loops.replaying else self.rendezvous.mean_of(value)

    def raise_postponed(self) -> None:
        self.leaving.raise_postponed()

    def leave_if_asked(self) -> None:
        self.saving.leave_if_asked()

    def was_torn(self, error: BaseException) -> bool:
        return self.model_parallel.was_torn(error)

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
