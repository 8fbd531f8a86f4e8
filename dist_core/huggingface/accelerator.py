"""Accelerator: Accelerate's, whose ``prepare`` gives the elastic loader and wrapper.

A loop that was written for Accelerate keeps its calls; it imports this class, and goes through
``dist_core.remaining_epochs_until``. The batch of a step is that of one process: the loader's ``batch_size`` times
``gradient_accumulation_steps``, however many replicas compute it. Loops in which the model is in evaluation mode see
all samples on every replica, so what they gather is whole everywhere; what training loops gather is each replica's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin, send_to_device
from accelerate.utils.operations import recursively_apply
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from dist_core.huggingface.alone import appear_alone, processes_started, reducer_options
from dist_core.huggingface.shared_evaluation import GatheredRows
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.model import AdaptiveDataParallel
from dist_core.training.others_loop import elastic_like
from dist_core.trial.current import get_core

_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class _Batches(AdaptiveDataLoader):
    """Puts each batch where the model is, as Accelerate's loaders do."""

    device: torch.device | None = None
    passes = 1
    """Passes of a step, each of which the script takes for a batch."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of samples follows the trial's epochs by itself."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return batches if self.device is None else map(functools.partial(send_to_device, device=self.device), batches)


class _Behind:
    """A loader without its first batches, for one loop; else it is the loader."""

    def __init__(self, loader: _Batches, batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._batches)

    def __iter__(self) -> Iterator[Any]:
        loader, models = self._loader, get_core().models
        if not torch.is_grad_enabled() or not any(model.training for model in models):
            return islice(iter(loader), self._batches, None)
        loader.leave_out_first(self._batches * (loader.batch_size // loader.passes))
        return iter(loader)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it is without types
    """Accelerate's Accelerator in an elastic trial, with its arguments.

    Raises InvalidTraining for plugins that divide the work in another way.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        for name in _OTHERS:
            if options.get(name) is not None:
                raise InvalidTraining(
                    f"Accelerator was given {name}; an elastic trial divides the work among replicas itself. Leave "
                    "it out; for a model that does not fit on one slot, use dist_core.ElasticModel"
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

    def wait_for_everyone(self) -> None:
        """Wait for the other replicas, once they train together; before that each comes when it does."""
        if get_core().generation.joined and torch.distributed.is_initialized():
            torch.distributed.barrier()

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects like `accelerate.Accelerator.prepare`; pass a model in the same call as its optimizer."""
        taken = [self._elastic_loader(each) if isinstance(each, DataLoader) else each for each in args]
        found = super().prepare(*taken, device_placement=device_placement)
        prepared = list(found) if len(args) > 1 else [found]
        for index, given in enumerate(args):
            if isinstance(given, torch.nn.Module) and not isinstance(given, AdaptiveDataParallel):
                prepared[index] = self._elastic_model(given, prepared[index], args)
        return tuple(prepared) if len(args) > 1 else prepared[0]

    def _elastic_loader(self, theirs: DataLoader[Any]) -> AdaptiveDataLoader:
        loader = elastic_like(
            theirs,
            _Batches,
            whom="Accelerator.prepare",
            processes=self._processes,
            passes=self._passes,
            seed=self.dataloader_config.data_seed if self.dataloader_config.use_seedable_sampler else None,
        )
        loader.shares_evaluation = False
        loader.passes = self._passes
        loader.device = self.device if self.device_placement else None
        return loader

    def _elastic_model(self, model: torch.nn.Module, prepared: Any, together: tuple[Any, ...]) -> Any:
        weights = {id(each) for each in model.parameters()}
        optimizers = [
            each
            for each in together
            if isinstance(each, torch.optim.Optimizer)
            and any(id(weight) in weights for group in each.param_groups for weight in group["params"])
        ]
        if not optimizers:
            if any(each.requires_grad for each in model.parameters()) and torch.is_grad_enabled() and model.training:
                raise InvalidTraining(
                    f"Accelerator.prepare was given {type(model).__name__} without its optimizer, so the trial would "
                    "not count its steps; prepare both in one call: prepare(model, optimizer, loader). If the model "
                    "is not trained, call eval() on it first"
                )
            return prepared
        schedules = [
            each
            for each in together
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler) and each.optimizer in optimizers
        ]
        return AdaptiveDataParallel(prepared, optimizers, schedules or None, self.scaler, **reducer_options(self))

    def _do_sync(self) -> None:
        """Tell Accelerate that a step's gradients are whole with its last pass, which the trial knows."""
        models = get_core().models
        for model in models:
            model.step_place.is_asked_for = True
        self.gradient_state._set_sync_gradients(all(model.step_place.is_last_micro_batch for model in models))

    # ------------------------------------------------------------------ what the replicas tell each other

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches that an earlier run of the script has trained in this epoch."""
        if isinstance(dataloader, _Batches):
            return _Behind(dataloader, num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def gather(self, tensor: Any) -> Any:
        """Gather what all replicas have, in rank order, where each has its own.

        Evaluations see all samples on every replica: what they gather is the replica's own.
        """
        return recursively_apply(_gathered, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, or the mean, of what each replica has."""

        def reduced(mine: torch.Tensor) -> torch.Tensor:
            parts = _parts(mine)
            total = mine if parts is None else torch.stack(parts).sum(0).to(mine.dtype)
            if reduction == "mean" and parts is not None:
                total = total / len(parts)
            return total * scale if scale != 1.0 else total

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def no_sync(self, model: Any) -> Any:
        # Passes of a step are kept apart by the wrapper; a loop's own no_sync would sum them up once more.
        return contextlib.nullcontext() if isinstance(model, AdaptiveDataParallel) else super().no_sync(model)


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    parts = _parts(mine)
    if parts is None:
        return mine
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return every replica's tensor by rank; None where each has what all of them have together.

    Between loops that is so of what an evaluation has found out: it is the same on all replicas.
    """
    core = get_core()
    core.outside.meet()
    if core.generation.stands_alone or core.passes_do_not_count or core.loops.evaluations:
        return None
    rows = tensor.detach().cpu().reshape(1) if tensor.dim() == 0 else tensor.detach().cpu()
    exact = rows.double() if rows.is_floating_point() else rows.long()
    gathered = GatheredRows(core)
    sizes = [int(each) for each in gathered.rows(torch.tensor([len(rows)]).numpy())]
    every = torch.from_numpy(gathered.rows(exact.numpy()))
    if len(sizes) == 1:
        # A replica was lost in this step, which does not count.
        return None
    cut = torch.split(every, sizes)
    parts = [part.to(tensor.dtype).to(tensor.device).reshape(-1, *tensor.shape[1:]) for part in cut]
    parts = [part.reshape(()) if tensor.dim() == 0 else part for part in parts]
    if core.position.has_evaluated and all(torch.equal(part, tensor) for part in parts):
        return None
    return parts
