"""Accelerator: Accelerate's, whose ``prepare`` gives the elastic loader and wrapper.

A loop that was written for Accelerate keeps its calls; it imports this class, and goes through
``dist_core.remaining_epochs_until``. The batch of a step is that of one process: the loader's ``batch_size`` times
``gradient_accumulation_steps``, however many replicas compute it. Loops in which the model is in evaluation mode see
all samples on every replica, so what they gather is whole everywhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin, send_to_device
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from dist_core.huggingface.alone import appear_alone, processes_started, reducer_options
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.model import AdaptiveDataParallel
from dist_core.training.others_loader import elastic_like
from dist_core.trial.current import get_core

_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class _Batches(AdaptiveDataLoader):
    """Puts each batch where the model is, as Accelerate's loaders do."""

    device: torch.device | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return batches if self.device is None else map(functools.partial(send_to_device, device=self.device), batches)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it is without types
    """Takes what Accelerate's takes. Raises InvalidTraining for plugins that divide the work in another way."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        for name in _OTHERS:
            if options.get(name) is not None:
                raise InvalidTraining(
                    f"Accelerator was given {name}; an elastic trial divides the work among replicas itself. Leave it "
                    "out; a model that does not fit on one slot is trained with dist_core.ElasticModel"
                )
        plugin = options.pop("gradient_accumulation_plugin", None) or GradientAccumulationPlugin(
            num_steps=options.pop("gradient_accumulation_steps", 1)
        )
        options.pop("gradient_accumulation_steps", None)
        self._passes = int(plugin.num_steps)
        plugin.num_steps = 1
        super().__init__(*arguments, gradient_accumulation_plugin=plugin, **options)
        self._processes = processes_started()
        appear_alone()

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As Accelerate's; a model comes with its optimizer, so that both take part in the trial."""
        taken = [self._elastic_loader(each) if isinstance(each, DataLoader) else each for each in args]
        found = super().prepare(*taken, device_placement=device_placement)
        prepared = list(found) if len(args) > 1 else [found]
        for index, given in enumerate(args):
            if isinstance(given, torch.nn.Module) and not isinstance(given, AdaptiveDataParallel):
                prepared[index] = self._elastic_model(given, prepared[index], args)
        return tuple(prepared) if len(args) > 1 else prepared[0]

    def _elastic_loader(self, theirs: DataLoader[Any]) -> AdaptiveDataLoader:
        loader = elastic_like(
            theirs, _Batches, whom="Accelerator.prepare", processes=self._processes, passes=self._passes
        )
        loader.shares_evaluation = False
        loader.device = self.device if self.device_placement else None
        return loader

    def _elastic_model(self, given: torch.nn.Module, prepared: Any, together: tuple[Any, ...]) -> Any:
        weights = {id(each) for each in given.parameters()}
        optimizers = [
            each
            for each in together
            if isinstance(each, torch.optim.Optimizer)
            and any(id(weight) in weights for group in each.param_groups for weight in group["params"])
        ]
        if not optimizers:
            if any(each.requires_grad for each in given.parameters()) and torch.is_grad_enabled() and given.training:
                raise InvalidTraining(
                    f"Accelerator.prepare was given {type(given).__name__} without its optimizer, so its steps would "
                    "not be the trial's; prepare both in one call: prepare(model, optimizer, loader), or put a model "
                    "that is not trained into eval() first"
                )
            return prepared
        schedules = [
            each
            for each in together
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler) and each.optimizer in optimizers
        ]
        return AdaptiveDataParallel(prepared, optimizers, schedules or None, self.scaler, **reducer_options(self))

    def _do_sync(self) -> None:
        """A step's gradients are whole with its last pass, which the trial knows."""
        models = get_core().models
        self.gradient_state._set_sync_gradients(all(model.step_place.is_last_micro_batch for model in models))

    def no_sync(self, model: Any) -> Any:
        # Passes of a step are kept apart by the wrapper; a loop's own no_sync would sum them up once more.
        return contextlib.nullcontext() if isinstance(model, AdaptiveDataParallel) else super().no_sync(model)
