"""Refusals of what an elastic Lightning trainer cannot do, raised before training begins."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dist_core.errors import InvalidTraining
from dist_core.lightning.package import callbacks, is_param_in_hook_signature, settled

_NEEDED = ("update_lr_schedulers", "_should_check_val_fx", "_accumulated_batches_reached", "_num_ready_batches_reached")
OLDEST_LIGHTNING = "2.6"


def refuse_old_lightning(epoch_loop: Any) -> None:
    missing = [name for name in _NEEDED if not hasattr(epoch_loop, name)]
    if missing:
        package = settled()
        version = import_module(package).__version__
        raise InvalidTraining(
            f"the elastic strategy does not support {package} {version}: it needs the training loop's "
            f"{missing[0]}(); install version {OLDEST_LIGHTNING} or newer"
        )


def refuse_trainer(trainer: Any, *, in_trial: bool) -> None:
    """Raise InvalidTraining if the Lightning trainer uses a feature that elastic trials do not support."""
    for callback in trainer.callbacks:
        for name, why in _REFUSED.items():
            kind = getattr(callbacks, name, None)
            if kind is not None and isinstance(callback, kind):
                raise InvalidTraining(f"the trainer has a {type(callback).__name__}; {why}")
        # A Tuner has them exit before anything is trained.
        if isinstance(callback, (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)) and (
            in_trial or not callback._early_exit
        ):
            raise InvalidTraining(
                f"the trainer has a {type(callback).__name__}, which runs several fits before it trains, but a trial "
                "trains its epochs once. Find the value beforehand with lightning's Tuner, or let the study suggest "
                "it"
            )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise InvalidTraining(
            "training_step takes a dataloader_iter, but the trial must see each batch that is trained on. Take "
            "batch and batch_idx"
        )


_REFUSED = {
    "GradientAccumulationScheduler": "the batch size of an elastic trial stays as it is, or follows goodput. Leave the "
    "callback out, or let the batch size grow: strategy=ElasticStrategy(batch='adaptive')",
    "BaseFinetuning": "it gives the optimizer another group of weights in some epoch, which a replica that joins later "
    "would not have. Give the optimizer all weights, and let them require a gradient from that epoch on: in "
    "on_train_epoch_start, module.requires_grad_(self.current_epoch >= 5)",
    "WeightAveraging": "its average is not sent to replicas that join. Keep the average as a module of the "
    "LightningModule, such as torch.optim.swa_utils.AveragedModel, and update it in on_train_batch_end",
    "StochasticWeightAveraging": "it swaps schedules, and its average is not sent to replicas that join. Keep the "
    "average as a module of the LightningModule, such as torch.optim.swa_utils.AveragedModel",
}
"""Callbacks, and what to do instead."""


def refuse_another(loader: Any, first: Any) -> None:
    """Refuse a loader made in the middle of training if it has another number of samples than ``first``."""
    for what, now, before in (
        ("samples", loader.source.num_samples, first.source.num_samples),
        ("samples per step", loader.batch_size, first.batch_size),
    ):
        if now != before:
            raise InvalidTraining(
                f"the new training loader has {now} {what} but the first one had {before}; an elastic trial counts "
                "its epochs by this number. Keep the number, and change only the samples themselves"
            )


def refuse_several(loaders: int) -> None:
    if loaders > 1:
        raise InvalidTraining(
            f"fit was given {loaders} training loaders; an elastic trial trains on one. Join the datasets: "
            "torch.utils.data.StackDataset yields samples of all of them"
        )
