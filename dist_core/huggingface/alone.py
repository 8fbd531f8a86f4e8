"""Accelerate beside a trial: it is told that it is alone, for what replicas do together is ours, and which one this is.

Whoever asks it whether this is the main process (loggers, progress bars, what writes checkpoints) hears of rank 0.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from dist_core.trial.current import get_core

_STARTED = "processes_started"
"""Key under which the number of processes that Accelerate found is kept."""


def processes_started() -> int:
    """Return how many processes torchrun or the like has started; 1 in a replica of a scheduler's."""
    state = PartialState()
    return max(1, int(state._shared_state.get(_STARTED, state.num_processes)))


def appear_alone() -> None:
    """Make this process appear alone to Accelerate, from now on and after it has taken another rank."""
    state = PartialState()
    state._shared_state.setdefault(_STARTED, state.num_processes)
    state.num_processes = 1
    state.distributed_type = DistributedType.NO
    _show_rank()
    get_core().life.on_entering(_show_rank)


def _show_rank() -> None:
    state, rank = PartialState(), get_core().shown_rank
    state.process_index = state.local_process_index = rank
    if AcceleratorState._shared_state:
        # It copies what it finds when it is made.
        AcceleratorState._shared_state.update(PartialState._shared_state)


def reducer_options(accelerator: Any) -> dict[str, Any]:
    """Return the options for DistributedDataParallel that the wrapper takes over from Accelerate."""
    wanted = {} if accelerator.ddp_handler is None else accelerator.ddp_handler.to_kwargs()
    return {name: wanted[name] for name in ("find_unused_parameters", "bucket_cap_mb") if name in wanted}
