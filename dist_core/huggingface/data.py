"""Loaders over the samples of a trainer's own, with what its arguments say of loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dist_core.training.loader import AdaptiveDataLoader
from dist_core.training.others_loader import is_stream, order_of


class TrainingPass:
    """Training data for the trainer: as many microbatches an epoch as one process would have."""

    def __init__(self, loader: AdaptiveDataLoader, batches: int | None) -> None:
        self.dataset = loader.dataset
        self.loader = loader
        self._batches = batches

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def loader_like(
    theirs: Any, args: Any, batch: int, *, shuffle: bool, drop_last: bool = False, most: int | None = None
) -> AdaptiveDataLoader:
    """Over the same samples as ``theirs``, a loader that the trainer has made; ``args``: its TrainingArguments.

    ``most``: examples of one pass. ``shuffle``: whether the order is the trainer's, and not that of the dataset.
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
    order = order_of(theirs) if shuffle else {}
    seed = args.seed if args.data_seed is None else args.data_seed
    return AdaptiveDataLoader(
        theirs.dataset, batch, **order, seed=seed, drop_last=drop_last, max_local_bsz=most, **options
    )
