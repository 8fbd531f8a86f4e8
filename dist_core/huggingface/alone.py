"""What Accelerate is told of the world: it is alone, for what replicas do together is ours; and which replica this is.

Whoever asks it whether this is the main process (loggers, progress bars, what writes checkpoints) hears of rank 0.
"""

from __future__ import annotations

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_STARTED = "processes_started"
"""What Accelerate found, kept with what it knows."""


def processes_started() -> int:
    """By torchrun or the like, which gives each a batch of its own; 1 in a replica of a scheduler's."""
    state = PartialState()
    return max(1, int(state._shared_state.get(_STARTED, state.num_processes)))


def appear_alone(rank: int) -> None:
    """``rank``: the replica's; known to be another after a rescale, so this is called again then."""
    state = PartialState()
    state._shared_state.setdefault(_STARTED, state.num_processes)
    state.num_processes = 1
    state.distributed_type = DistributedType.NO
    state.process_index = state.local_process_index = rank
    if AcceleratorState._shared_state:
        # It copies what it finds when it is made.
        AcceleratorState._shared_state.update(PartialState._shared_state)
