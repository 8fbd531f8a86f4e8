"""Representative of this process in its trial: the training core, or what does without torch until there is one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dist_core.hooks import when_imported
from dist_core.link.environment import ReplicaEnvironment
from dist_core.state.seeds import seed_torch, trial_seed
from dist_core.trial.plain_replica import Participant, begin, begun

if TYPE_CHECKING:
    from dist_core.trial.replica import Replica


def present_replica() -> Participant:
    """Made on first use."""
    replica = begun()
    if replica is not None:
        return replica.present
    environment = ReplicaEnvironment.from_environ()
    if environment is None or "torch" in sys.modules:
        return training_core()
    seed = trial_seed(environment.trial_id, environment.seed)

    def on_torch() -> None:
        seed_torch(seed)
        if "dist_core.trial.current" not in sys.modules:
            training_core()

    # That module may be what imports torch.
    when_imported("dist_core.trial.current", training_core)
    return begin(environment, on_torch)


def training_core() -> Replica:
    """Made on first use, which imports torch."""
    from dist_core.trial.current import get_core

    return get_core()
