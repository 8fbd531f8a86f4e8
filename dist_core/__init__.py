"""The training core inside every replica. Importing the package loads neither torch nor NumPy; names load on use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_core.version import __version__

if TYPE_CHECKING:
    from dist_core.accumulator import Accumulator
    from dist_core.data_loader import AdaptiveDataLoader, current_dataloader
    from dist_core.data_parallel import AdaptiveDataParallel
    from dist_core.session import (
        current_epoch,
        init_process_group,
        progress_step,
        rank,
        register_state,
        remaining_epochs_until,
        report,
        set_checkpoint_interval,
        world_size,
    )

_HOME = {
    "Accumulator": "accumulator",
    "AdaptiveDataLoader": "data_loader",
    "AdaptiveDataParallel": "data_parallel",
    "current_dataloader": "data_loader",
    "current_epoch": "session",
    "init_process_group": "session",
    "progress_step": "session",
    "rank": "session",
    "register_state": "session",
    "remaining_epochs_until": "session",
    "report": "session",
    "set_checkpoint_interval": "session",
    "world_size": "session",
}

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "__version__",
    "current_dataloader",
    "current_epoch",
    "init_process_group",
    "progress_step",
    "rank",
    "register_state",
    "remaining_epochs_until",
    "report",
    "set_checkpoint_interval",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dist_core' has no attribute {name!r}")
    return getattr(import_module(f"dist_core.{_HOME[name]}"), name)
