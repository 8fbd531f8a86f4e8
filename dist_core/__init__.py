"""The training core inside every replica. Importing the package loads neither torch nor NumPy; names load on use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_core.version import __version__

if TYPE_CHECKING:
    from dist_core.data.loader import AdaptiveDataLoader, current_dataloader
    from dist_core.gradients.model import AdaptiveDataParallel
    from dist_core.training_api import (
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
    from dist_core.trial.accumulator import Accumulator

_HOME = {
    "Accumulator": "trial.accumulator",
    "AdaptiveDataLoader": "data.loader",
    "AdaptiveDataParallel": "gradients.model",
    "current_dataloader": "data.loader",
    "current_epoch": "training_api",
    "init_process_group": "training_api",
    "progress_step": "training_api",
    "rank": "training_api",
    "register_state": "training_api",
    "remaining_epochs_until": "training_api",
    "report": "training_api",
    "set_checkpoint_interval": "training_api",
    "world_size": "training_api",
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
