"""Loaders of torch's that a trainer was given, and an AdaptiveDataLoader over the same samples in their place."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from dist_core.errors import InvalidTraining
from dist_core.training.loader import AdaptiveDataLoader

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
    """Return an elastic loader in place of one that serves ``processes``, in ``passes`` a step.

    Raises InvalidTraining for a loader whose batches somebody else cuts; ``whom`` it was given to.
    """
    if type(theirs).__iter__ is not DataLoader.__iter__:
        raise InvalidTraining(
            f"{whom} was given a {type(theirs).__name__}, whose __iter__ is its own; the trial forms the batches "
            "itself, because replicas share them, and would pass that over. Give a torch.utils.data.DataLoader, and do "
            "in its dataset or its collate_fn what the class does"
        )
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
    return type(sampler).__module__.partition(".")[0] in ("torch", "accelerate")


def _innermost(theirs: Any) -> Any:
    """Return the sampler that the user has chosen; libraries put theirs around it."""
    sampler = getattr(theirs, "sampler", None)
    batches = getattr(theirs, "batch_sampler", None)
    while batches is not None and not isinstance(getattr(batches, "sampler", None), Sampler):
        batches = getattr(batches, "batch_sampler", None)
    return sampler if batches is None else batches.sampler
