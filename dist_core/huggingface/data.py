"""Loaders over the samples of a trainer's own, with what its arguments say of loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from dist_core.errors import InvalidTraining
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.others_loop import (
    InPlaceOfLoader,
    is_stream,
    order_of,
    own_batch_sampler,
    refuse_own_iteration,
)


class TrainingPass(InPlaceOfLoader):
    """Training data for the trainer: as many microbatches an epoch as one process would have."""

    def __init__(self, loader: AdaptiveDataLoader, batches: int | None) -> None:
        super().__init__(loader)
        self._batches = batches

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def refuse_another_loader(theirs: Any, args: Any) -> None:
    """Raise InvalidTraining for a training loader whose batches are not what the trainer's arguments say."""
    if not isinstance(theirs, DataLoader):
        raise InvalidTraining(
            f"get_train_dataloader() returned a {type(theirs).__name__}; replicas share each batch, so it has to "
            "return a torch.utils.data.DataLoader. Join datasets with torch.utils.data.ConcatDataset"
        )
    refuse_own_iteration(theirs, whom="the trainer")
    if (chosen := own_batch_sampler(theirs)) is not None:
        raise InvalidTraining(
            f"get_train_dataloader() returned a DataLoader whose {type(chosen).__name__} chooses the samples of each "
            "batch, but the trial forms the batches itself, because replicas share them. Use a sampler that yields "
            "single indices (in sentence-transformers: one dataset, and no batch_sampler in the arguments)"
        )
    cut = getattr(theirs.batch_sampler, "batch_size", theirs.batch_size)
    # The trainer's own has a batch for each GPU that the process sees.
    if cut not in (None, args.per_device_train_batch_size, args.train_batch_size):
        raise InvalidTraining(
            f"get_train_dataloader() returned batches of {cut} samples, but per_device_train_batch_size is "
            f"{args.per_device_train_batch_size}, by which steps are counted and shared. Set both to one number"
        )


def loader_like(
    theirs: Any, args: Any, batch: int, *, shuffles: bool, drop_last: bool = False, most: int | None = None
) -> AdaptiveDataLoader:
    """Over the same samples as ``theirs``, a loader that the trainer has made; ``args``: its TrainingArguments.

    ``most``: examples of one pass. ``shuffles``: whether the trainer may have the samples in an order at random.
    """
    options = {
        "collate_fn": theirs.collate_fn,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
    }
    if args.dataloader_num_workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
    if is_stream(theirs):
        length = args.max_steps * batch if args.max_steps > 0 else None
        return AdaptiveDataLoader(theirs.dataset, batch, epoch_size=length, max_local_bsz=most, **options)
    order = order_of(theirs)
    if not shuffles:
        order.pop("shuffle", None)
    seed = args.seed if args.data_seed is None else args.data_seed
    return AdaptiveDataLoader(
        theirs.dataset, batch, **order, seed=seed, drop_last=drop_last, max_local_bsz=most, **options
    )
