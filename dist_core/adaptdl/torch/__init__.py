"""``adaptdl.torch``: the loader, the model wrapper and the epoch loop under AdaptDL's names and argument orders."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from dist_core.adaptdl.env import core_of_job
from dist_core.adaptdl.torch import _metrics, iterator, scaling_rules
from dist_core.adaptdl.torch.accumulator import Accumulator
from dist_core.adaptdl.torch.data import ElasticSampler
from dist_core.adaptdl.torch.epoch import current_epoch, finished_epochs, remaining_epochs_until
from dist_core.generations.torchrun import join_torchrun
from dist_core.gradients.learning_rate import ScalingRule
from dist_core.link.environment import standalone_world
from dist_core.torch_private import HashStore
from dist_core.training.loader import AdaptiveDataLoader, current_dataloader
from dist_core.training.model import AdaptiveDataParallel as _AdaptiveDataParallel
from dist_core.trial.current import get_core

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ElasticSampler",
    "_metrics",
    "current_dataloader",
    "current_epoch",
    "finished_epochs",
    "init_process_group",
    "iterator",
    "remaining_epochs_until",
    "scaling_rules",
]


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
) -> None:
    """Make ``torch.distributed`` usable: over the processes of torchrun, of AdaptDL's variables or of the arguments.

    Replicas of a scheduler find each other at their first training step; until then collectives are refused.
    Gradients go over NCCL between GPUs and over Gloo between CPUs, whatever ``backend`` says.
    """
    get_core()
    if dist.is_initialized():
        # Of a trial's replicas it is from the start.
        return
    address = urlsplit(init_method or "")
    chosen = {
        "RANK": rank if rank is not None else os.environ.get("ADAPTDL_REPLICA_RANK"),
        "WORLD_SIZE": world_size if world_size is not None else os.environ.get("ADAPTDL_NUM_REPLICAS"),
        "MASTER_ADDR": address.hostname or os.environ.get("ADAPTDL_MASTER_ADDR"),
        "MASTER_PORT": address.port or os.environ.get("ADAPTDL_MASTER_PORT"),
    }
    for name, value in chosen.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
    own_rank, size = standalone_world()
    if size > 1:
        join_torchrun(own_rank, size)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


class AdaptiveDataParallel(_AdaptiveDataParallel):
    """AdaptDL's ``AdaptiveDataParallel``, with AdaptDL's argument order.

    ``fourth``: gradient scaler, scaling rule or name, as in that AdaptDL version.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        fourth: Any = None,
        scaling_rule: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        scaler = options.pop("mp_scaler", None)
        if isinstance(fourth, str):
            name = fourth
        elif fourth is not None and hasattr(fourth, "factor"):
            scaling_rule = fourth
        elif fourth is not None:
            scaler = fourth
        core_of_job()
        rule: ScalingRule | None = scaling_rule
        super().__init__(model, optimizer, lr_scheduler, scaler, rule, name, **options)

    @property
    def _state(self) -> SimpleNamespace:
        """Scripts save ``network._state.model``."""
        return SimpleNamespace(model=self.module, optimizer=self.part.optimizers[0])
