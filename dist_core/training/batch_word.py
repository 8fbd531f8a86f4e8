"""What a trainer's user says of the batch: "fixed", "adaptive", or the most examples that it may grow to."""

from __future__ import annotations

from typing import Literal

from dist_core.errors import InvalidTraining
from dist_core.training.loader import AdaptiveDataLoader

BatchWord = Literal["fixed", "adaptive"] | int

MOST_GROWTH = 32
"""How many times the batch that the user gave an adaptive one may become, unless it is said."""


def check_batch_word(batch: object) -> None:
    if batch not in ("fixed", "adaptive") and not (isinstance(batch, int) and batch > 0):
        raise InvalidTraining(f"batch is {batch!r}; choose 'fixed', 'adaptive', or the most examples it may grow to")


def use_batch_word(loader: AdaptiveDataLoader, batch: BatchWord) -> None:
    """Passes stay within what the loader was told of them."""
    if batch != "fixed":
        largest = loader.batch_size * MOST_GROWTH if batch == "adaptive" else batch
        loader.autoscale_batch_size(largest, (1, loader.bounds.max_atomic), gradient_accumulation=True)
