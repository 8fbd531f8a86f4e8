"""Training loops that are not ours: an AdaptiveDataLoader in place of torch's loader, and steps of the user's batch."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from dist_core.errors import InvalidTraining
from dist_core.gradients.step_place import StepPlace
from dist_core.training.loader import AdaptiveDataLoader
from dist_core.trial.replica import Replica

Loader = TypeVar("Loader", bound=AdaptiveDataLoader)

_TAKEN_OVER = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "persistent_workers",
)


def elastic_like(
    theirs: DataLoader[Any], kind: type[Loader], *, whom: str, processes: int = 1, passes: int = 1, **options: Any
) -> Loader:
    """Return an elastic loader over the samples of a plain one.

    ``processes`` and ``passes``: how many of each share a step in the loop that the plain one is for.

    Raises InvalidTraining for a loader whose batches somebody else cuts; ``whom`` it was given to.
    """
    refuse_own_iteration(theirs, whom=whom)
    if theirs.batch_size is None:
        raise InvalidTraining(
            f"{whom} was given a DataLoader with a batch_sampler, but the trial forms the batches itself, because "
            "replicas share them. Give batch_size, and a sampler that yields single indices"
        )
    taken = {name: getattr(theirs, name) for name in _TAKEN_OVER}
    taken["generator"] = theirs.generator or getattr(_innermost(theirs), "generator", None)
    if theirs.num_workers:
        taken["prefetch_factor"] = theirs.prefetch_factor
    batch = theirs.batch_size * processes
    return kind(
        theirs.dataset,
        batch * passes,
        **order_of(theirs),
        drop_last=theirs.drop_last,
        max_local_bsz=batch if passes > 1 else None,
        **taken,
        **options,
    )


def refuse_own_iteration(theirs: DataLoader[Any], *, whom: str) -> None:
    """Raise InvalidTraining for a loader of a class that does something with the batches when it is read."""
    for kind in type(theirs).__mro__:
        own = [name for name in ("__iter__", "_get_iterator") if name in vars(kind)]
        if own and not _is_known(kind):
            raise InvalidTraining(
                f"{whom} was given a {type(theirs).__name__}, whose own {own[0]} would be ignored: the trial forms the "
                "batches itself, because replicas share them. Give a torch.utils.data.DataLoader, and do in its "
                "dataset or its collate_fn what the class does"
            )


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "accelerate")


class InPlaceOfLoader:
    """Base of what a trainer gets in place of torch's loader; what it has not itself is that of the elastic one."""

    def __init__(self, loader: AdaptiveDataLoader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def is_stream(theirs: Any) -> bool:
    return isinstance(theirs.dataset, IterableDataset)


def order_of(theirs: Any) -> dict[str, Any]:
    """Arguments by which our loader goes through the samples as this one does; those of a stream have their own."""
    sampler = _innermost(theirs)
    if is_stream(theirs) or type(sampler) is SequentialSampler:
        return {}
    return {"shuffle": True} if _is_a_shuffle(sampler) else {"sampler": sampler}


def _is_a_shuffle(sampler: Any) -> bool:
    """Tell whether this is what ``shuffle=True`` makes, or a library's equivalent: each sample once, in any order."""
    if not isinstance(sampler, RandomSampler) or sampler.replacement or sampler._num_samples is not None:
        return False
    return _is_known(type(sampler))


def _innermost(theirs: Any) -> Any:
    """Return the sampler that the user has chosen; libraries put theirs around it."""
    sampler = getattr(theirs, "sampler", None)
    batches = getattr(theirs, "batch_sampler", None)
    while batches is not None and not isinstance(getattr(batches, "sampler", None), Sampler):
        batches = getattr(batches, "batch_sampler", None)
    return sampler if batches is None else batches.sampler


def own_batch_sampler(theirs: DataLoader[Any]) -> Any:
    """Return a batch sampler that chooses which samples come together; None for one that cuts a sampler's order."""
    batches = theirs.batch_sampler
    while batches is not None and type(batches).__iter__ is not BatchSampler.__iter__:
        if not _is_known(type(batches)):
            return batches
        batches = getattr(batches, "batch_sampler", None)
    return None


_TOLERANCE = 1e-9


class UserSteps:
    """Converts between samples and steps of the batch size that the user asked for.

    ``batch``: samples of one; ``per_epoch``: how many an epoch has, where that is known.
    """

    def __init__(self, core: Replica, loader: AdaptiveDataLoader, batch: int, per_epoch: int) -> None:
        self._core = core
        self._loader = loader
        self._batch = batch
        self.per_epoch = per_epoch

    def of_epoch_behind(self, place: StepPlace) -> int | None:
        """Return the number of steps of the present epoch, the one that runs included; None where it has no length."""
        size = self._loader.epoch_size
        if size is None:
            return None
        within = (self._progress_behind(place) - self._core.position.epoch * size) / self._batch
        return min(self.per_epoch, math.ceil(within - _TOLERANCE * self.per_epoch))

    def ends_epoch(self, place: StepPlace) -> bool:
        """Tell whether the training loop is over once the running step has counted; False also where nobody knows."""
        size = self._loader.epoch_size
        if size is None:
            return False
        if self._loader.drop_last and not self._loader.bounds.adaptive:
            return self.of_epoch_behind(place) == self.per_epoch
        return self._progress_behind(place) >= (self._core.position.epoch + 1) * size * (1 - _TOLERANCE)

    def _progress_behind(self, place: StepPlace) -> float:
        assert self._core.adaptation is not None and place.step is not None
        return self._core.position.epoch_progress + self._core.adaptation.worth_of(place.step.global_batch)


BatchWord = Literal["fixed", "adaptive"] | int

MOST_GROWTH = 32
"""Most growth of the batch size over the user's, unless the user sets a bound."""


def check_batch_word(batch: object) -> None:
    if batch not in ("fixed", "adaptive") and not (isinstance(batch, int) and batch > 0):
        raise InvalidTraining(
            f"batch is {batch!r}; choose 'fixed', 'adaptive', or the largest number of examples that it may grow to"
        )


def use_batch_word(loader: AdaptiveDataLoader, batch: BatchWord) -> None:
    """Apply a trainer's ``batch=``; passes stay within what the loader was told of them."""
    if batch != "fixed":
        largest = loader.batch_size * MOST_GROWTH if batch == "adaptive" else batch
        loader.autoscale_batch_size(largest, (1, loader.bounds.max_atomic), gradient_accumulation=True)
