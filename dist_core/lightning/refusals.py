"""What an elastic trainer of Lightning's cannot do, told before it begins."""

from __future__ import annotations

from typing import Any

from dist_core.errors import InvalidTraining

_NEEDED = ("update_lr_schedulers", "_should_check_val_fx", "_accumulated_batches_reached", "_num_ready_batches_reached")
OLDEST_LIGHTNING = "2.6"


def refuse_old_lightning(epoch_loop: Any) -> None:
    missing = [name for name in _NEEDED if not hasattr(epoch_loop, name)]
    if missing:
        import lightning

        raise InvalidTraining(
            f"lightning {lightning.__version__} is not known to the elastic strategy, which needs its training loop's "
            f"{missing[0]}(); install lightning>={OLDEST_LIGHTNING}"
        )


def refuse_trainer(trainer: Any) -> None:
    """``trainer``: Lightning's, about to fit."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    if any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks):
        raise InvalidTraining(
            "the trainer has a GradientAccumulationScheduler; the batch of an elastic trial stays what it began with, "
            "or follows goodput. Leave it out, or let the batch grow: strategy=ElasticStrategy(batch='adaptive')"
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise InvalidTraining(
            "training_step takes a dataloader_iter; the trial has to see each batch that is trained on. Take batch "
            "and batch_idx"
        )


def refuse_several(loaders: int) -> None:
    if loaders > 1:
        raise InvalidTraining(
            f"fit was given {loaders} training loaders; an elastic trial trains on one. Join the datasets: "
            "torch.utils.data.StackDataset gives samples of all of them"
        )
