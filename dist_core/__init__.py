"""The training core inside every replica. Importing the package loads neither torch nor NumPy; names load on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_core.hooks import loaded_on_use
from dist_core.version import __version__

if TYPE_CHECKING:
    from dist_core.larger.model import ElasticModel
    from dist_core.larger.pipeline import ElasticPipeline
    from dist_core.larger.sharded import ElasticFullyShard
    from dist_core.preparation.prepare import prepared
    from dist_core.state.checkpoint_reader import CheckpointReader
    from dist_core.training.accumulator import Accumulator
    from dist_core.training.api import (
        current_epoch,
        init_process_group,
        keep,
        progress_step,
        rank,
        register_state,
        remaining_epochs_until,
        report,
        set_checkpoint_interval,
        world_size,
    )
    from dist_core.training.loader import AdaptiveDataLoader, current_dataloader
    from dist_core.training.model import AdaptiveDataParallel

_HOME = {
    "Accumulator": ".training.accumulator",
    "AdaptiveDataLoader": ".training.loader",
    "AdaptiveDataParallel": ".training.model",
    "CheckpointReader": ".state.checkpoint_reader",
    "ElasticFullyShard": ".larger.sharded",
    "ElasticModel": ".larger.model",
    "ElasticPipeline": ".larger.pipeline",
    "current_dataloader": ".training.loader",
    "current_epoch": ".training.api",
    "init_process_group": ".training.api",
    "keep": ".training.api",
    "prepared": ".preparation.prepare",
    "progress_step": ".training.api",
    "rank": ".training.api",
    "register_state": ".training.api",
    "remaining_epochs_until": ".training.api",
    "report": ".training.api",
    "set_checkpoint_interval": ".training.api",
    "world_size": ".training.api",
}

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "CheckpointReader",
    "ElasticFullyShard",
    "ElasticModel",
    "ElasticPipeline",
    "__version__",
    "current_dataloader",
    "current_epoch",
    "init_process_group",
    "keep",
    "prepared",
    "progress_step",
    "rank",
    "register_state",
    "remaining_epochs_until",
    "report",
    "set_checkpoint_interval",
    "world_size",
]


__getattr__ = loaded_on_use(__name__, _HOME)
