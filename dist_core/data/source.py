"""Sources of batches: a dataset with indices, or a stream. Both hand out planned steps and count what was used.

Loading itself is torch's DataLoader. What was prefetched for one plan is dropped when the plan changes; the cursor
knows what counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count, islice
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from dist_core.data.order import (
    Division,
    ElasticCursor,
    Indices,
    LoadedStep,
    PartedCursor,
    StepPlan,
    StreamCursor,
    divide,
    evaluation_share,
)
from dist_core.data.parted_source import PartedSource, first_items
from dist_core.errors import InvalidTraining
from dist_core.generations.decision import short_checksum
from dist_core.state.random_streams import Drawing, seeded
from dist_core.state.seeds import derived_seed


class BatchSource(Protocol):
    num_samples: int | None
    """Samples a pass; None for a stream whose length nobody knows."""

    @property
    def cursor(self) -> ElasticCursor | StreamCursor | PartedCursor: ...

    @property
    def order_fingerprint(self) -> int:
        """16 bits of the order of this pass, as it was drawn or is to be; 0 where nothing can differ."""
        ...

    def begin_loop(self) -> None:
        """Begin a training loop; its steps may be asked for several times, as they change."""
        ...

    def end_loop(self) -> None:
        """End the loop's workers now: left to the garbage collector, each would be waited for five seconds."""
        ...

    def steps(self, division: Division) -> Iterator[LoadedStep]:
        """Yield steps from the cursor on, across passes; each is asked for when the one before has been committed.

        They may end earlier, for the division to be made anew.
        """
        ...

    def commit(self, taken: int, division: Division) -> None:
        """Advance the position past ``taken`` samples, because their step was applied."""
        ...

    def evaluation(
        self, *, rank: int, world_size: int, batch: int, workers: int, seen: tuple[int, int] | None = None
    ) -> Iterator[Any]:
        """Batches of this replica's share of one pass, from the beginning; the cursor stays.

        ``workers``: parts that a stream has for each replica, where it is divided. ``seen``: first and number of the
        samples to leave out, in the order of the present pass.
        """
        ...

    def first_samples(self, number: int, *, behind: int = 0) -> Iterator[Any]:
        """Return one batch of the first samples behind so many others, for a pass that does not count."""
        ...


class _PlannedBatches:
    """Batch sampler whose batches are planned while the loop runs."""

    def __init__(self) -> None:
        self.batches: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches


class IndexedSource:
    """A map-style dataset, in natural order, shuffled, or as a sampler of the user's draws."""

    def __init__(
        self, dataset: Dataset[Any], *, shuffle: bool, seed: int, sampler: Iterable[int] | None, options: dict[str, Any]
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise InvalidTraining(
                f"{type(dataset).__name__} has __getitem__ but no length; give it __len__, or make it an "
                "IterableDataset"
            )
        if sampler is not None:
            _refuse_sampler(sampler, shuffle=shuffle)
        ordered = cast("Sized", dataset if sampler is None else sampler)
        self.num_samples: int | None = len(ordered)
        self._ordered = ordered
        self._drawn: OrderedDict[tuple[int, int], tuple[Indices, int]] = OrderedDict()
        """The sampler's order and fingerprint by seed and pass, kept because a sampler may not draw the same again."""
        draw = None if sampler is None else lambda number: self._draw(sampler, number)
        self.cursor = ElasticCursor(len(ordered), shuffle=shuffle, seed=seed, draw=draw)
        self._sampler = sampler
        self._planned = _PlannedBatches()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=cast("Any", self._planned), **options)
        self._dataset, self._options = dataset, options
        self._training_plan = _PlannedBatches()
        self._training_loader: DataLoader[Any] | None = None

    def begin_loop(self) -> None:
        if len(self._ordered) != self.num_samples:
            raise InvalidTraining(
                f"{type(self._ordered).__name__} had {self.num_samples} samples when the loader was made and has "
                f"{len(self._ordered)} now, but an epoch of a trial is as long as the first one. Give the loader the "
                "whole dataset and a sampler that draws that many of its indices, such as those in use now, again and "
                "again"
            )
        if self._training_loader is None or not self._options.get("persistent_workers"):
            # Workers see the dataset as it is when they start. Within a loop they stay, whatever the batch size.
            options = {**self._options, "persistent_workers": self._options.get("num_workers", 0) > 0}
            self._training_loader = DataLoader(self._dataset, batch_sampler=cast("Any", self._training_plan), **options)

    def end_loop(self) -> None:
        if not self._options.get("persistent_workers"):
            self._training_loader = None

    def _draw(self, sampler: Iterable[int], number: int) -> Indices:
        # A replica that comes later goes by the trial's seed, whatever its own code has said.
        key = self.cursor.seed, number
        if key not in self._drawn:
            order = _drawn(sampler, seed=self.cursor.seed, number=number)
            self._drawn[key] = order, short_checksum(order.tobytes())
            while len(self._drawn) > _PASSES_KEPT:
                self._drawn.popitem(last=False)
        return self._drawn[key][0]

    @property
    def order_fingerprint(self) -> int:
        drawn = self._drawn.get((self.cursor.seed, self.cursor.passes))
        if drawn is not None:
            return drawn[1]
        return short_checksum(str(self.cursor.seed).encode()) if self.cursor.shuffle else 0

    def steps(self, division: Division) -> Iterator[LoadedStep]:
        assert self._training_loader is not None
        plans: list[StepPlan] = []
        self._training_plan.batches = self._plan_ahead(division, plans)
        batches = iter(self._training_loader)
        number = 0
        while True:
            first = next(batches)
            plan, plans[number] = plans[number], cast("Any", None)
            rest = [next(batches) for _ in plan.micro_batches[1:]]
            yield LoadedStep(plan, [first, *rest], division.measures(division.first_step + number))
            number += 1

    def _plan_ahead(self, division: Division, plans: list[StepPlan]) -> Iterator[list[int]]:
        """Yield this replica's coming micro-batches as indices, on a copy of the cursor that runs ahead."""
        ahead = self.cursor.ahead()
        step = division.first_step
        while True:
            take = ahead.take(division.global_batch, avoid_small_rest=division.varies)
            passes = division.passes(step)
            plan = ahead.plan(
                take,
                rank=division.rank,
                world_size=division.world_size,
                accumulation=passes,
                least=division.least,
            )
            plans.append(plan)
            for indices in plan.micro_batches:
                yield indices.tolist()
            _commit(ahead, take, division)
            step += 1

    def commit(self, taken: int, division: Division) -> None:
        _commit(self.cursor, taken, division)

    def evaluation(
        self, *, rank: int, world_size: int, batch: int, workers: int, seen: tuple[int, int] | None = None
    ) -> Iterator[Any]:
        if seen is None:
            indices = self._evaluated
        else:
            indices = self.cursor.ahead().order()
            indices = np.delete(indices, slice(seen[0], seen[0] + seen[1]))
        share = evaluation_share(len(indices), rank=rank, world_size=world_size, batch=batch)
        mine = [int(indices[index]) for index in share]
        self._planned.batches = iter(mine[start : start + batch] for start in range(0, len(mine), batch))
        return iter(self._loader)

    @property
    def _evaluated(self) -> Indices:
        """Order of an evaluation that is no part of a training loop, where replicas have agreed on no seed."""
        if self._sampler is None:
            return np.arange(self.num_samples or 0)
        return _drawn(self._sampler, seed=0, number=self.cursor.passes)

    def first_samples(self, number: int, *, behind: int = 0) -> Iterator[Any]:
        order = self.cursor.ahead().order()
        places = (behind + np.arange(min(number, len(order)))) % len(order)
        self._planned.batches = iter([order[places].tolist()])
        return iter(self._loader)


_PASSES_KEPT = 3
"""The present pass, and those that are planned ahead."""


def _commit(cursor: ElasticCursor, taken: int, division: Division) -> None:
    ended = cursor.commit(taken)
    if not ended and division.drop_last and cursor.remaining < division.global_batch:
        cursor.end_pass()


def _refuse_sampler(sampler: Iterable[int], *, shuffle: bool) -> None:
    if shuffle:
        raise InvalidTraining(
            "AdaptiveDataLoader was given shuffle=True and a sampler; the sampler sets the order, so leave out shuffle"
        )
    if isinstance(sampler, DistributedSampler):
        raise InvalidTraining(
            "AdaptiveDataLoader was given a DistributedSampler, but it divides the samples among the replicas "
            "itself, because their number changes. Use shuffle=True, or a sampler over the whole dataset"
        )
    if not hasattr(sampler, "__len__"):
        raise InvalidTraining(
            f"the sampler {type(sampler).__name__} has no length; give it __len__, because all replicas must know "
            "where a pass ends"
        )


def _drawn(sampler: Iterable[int], *, seed: int, number: int) -> Indices:
    """Return the sampler's order for the pass of that number, the same on every replica and after every restart."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(number)
    key = int(np.random.Philox(key=[seed, number]).random_raw() >> np.uint64(1))
    generator = getattr(sampler, "generator", None)
    with seeded(key):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        drawn = list(sampler)
    if not all(isinstance(index, (int, np.integer)) for index in drawn):
        raise InvalidTraining(
            f"the sampler {type(sampler).__name__} does not yield single indices; a batch sampler fixes the batch "
            "size, which changes here. Give a sampler that yields integers"
        )
    return np.asarray(drawn, dtype=np.int64)


_SKIPPED_AT_ONCE = 1024


class _Stream:
    """The user's iterable with a position: continues where it is, starts anew when it is asked to go back.

    It draws random numbers of its own, alike on all replicas and at each reading of a pass: shuffled and augmented
    samples are the same for all, each of which keeps its part.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._drawing = Drawing()
        self._items: Iterator[Any] = iter(())
        self._passes = -1
        self._position = 0
        self._next: list[Any] = []

    def seek(self, passes: int, position: int) -> None:
        if passes != self._passes or position < self._position:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(passes)
            self._drawing.begin(derived_seed("stream", self._seed, passes))
            with self._drawing:
                self._items, self._next = iter(self._dataset), []
            self._passes, self._position = passes, 0
        while self._position < position and self.read(min(_SKIPPED_AT_ONCE, position - self._position)):
            pass

    def read(self, count: int) -> list[Any]:
        """Return the next items, fewer at the end of the pass."""
        with self._drawing:
            items = [*self._next[:count], *islice(self._items, max(0, count - len(self._next)))]
        self._next = self._next[count:]
        self._position += len(items)
        return items

    def has(self, count: int) -> bool:
        """Read ahead until ``count`` items are there, and tell whether this pass has them."""
        with self._drawing:
            self._next.extend(islice(self._items, max(0, count - len(self._next))))
        return len(self._next) >= count


class _StreamedSteps(IterableDataset[Any]):
    """Plans and cuts the stream where it is read: in this process, or in the one worker."""

    def __init__(self, stream: _Stream, collate: Callable[[list[Any]], Any]) -> None:
        self.stream = stream
        self.collate = collate
        self.division: Division | None = None
        self.passes = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield each step's plan, any pass that ends with it, and its first sample's checksum; then its batches."""
        division = self.division
        assert division is not None
        passes, position, step = self.passes, self.position, division.first_step
        self.stream.seek(passes, position)
        empty = 0
        while True:
            items = self.stream.read(division.global_batch)
            ends = not self.stream.has(division.global_batch if division.drop_last else 1)
            if not items or (division.drop_last and len(items) < division.global_batch):
                empty += 1
                if empty > 1:
                    raise InvalidTraining(
                        "the iterable dataset yielded no batch in a whole pass; it must yield at least one sample, or "
                        "one whole batch with drop_last=True"
                    )
                passes, position = passes + 1, 0
                self.stream.seek(passes, 0)
                continue
            empty = 0
            plan = divide(
                np.arange(len(items)),
                rank=division.rank,
                world_size=division.world_size,
                accumulation=division.passes(step),
                least=division.least,
            )
            # Alone there is nobody to compare it with.
            yield plan, ends, passes, checksum_of(items[0]) if division.world_size > 1 else 0
            for indices in plan.micro_batches:
                yield self.collate([items[index] for index in indices])
            position += len(items)
            if ends:
                passes, position = passes + 1, 0
                self.stream.seek(passes, 0)
            step += 1


class StreamSource:
    """IterableDataset that one worker reads, or none.

    Every replica reads the whole stream, in one order, and keeps its own part of each batch: nothing says how the
    stream could be divided.

    After a restart, and with a worker process after a change of plan, the stream is read again up to the cursor.
    """

    def __init__(self, dataset: IterableDataset[Any], *, seed: int, workers: int, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self.num_samples: int | None = len(cast("Sized", dataset)) if hasattr(dataset, "__len__") else None
        self.cursor = StreamCursor()
        collate = options.pop("collate_fn", None) or default_collate
        for name in ("batch_size", "persistent_workers"):
            options.pop(name, None)
        self._collate = collate
        self._steps = _StreamedSteps(_Stream(dataset, seed), collate)
        self._options = {**options, "num_workers": workers, "batch_size": None, "collate_fn": _as_it_is}
        self.order_fingerprint = 0
        self._ends = False
        self._pass_of_step = 0

    def begin_loop(self) -> None:
        """Do nothing: a stream is read anew wherever it is begun."""

    def end_loop(self) -> None:
        """Do nothing: a stream has no workers of its own."""

    def steps(self, division: Division) -> Iterator[LoadedStep]:
        self._steps.division = division
        self._steps.passes, self._steps.position = self.cursor.passes, self.cursor.position
        loaded = iter(DataLoader(self._steps, **self._options))
        number = 0
        while True:
            plan, self._ends, self._pass_of_step, self.order_fingerprint = next(loaded)
            batches = [next(loaded) for _ in plan.micro_batches]
            yield LoadedStep(plan, batches, division.measures(division.first_step + number))
            number += 1

    def commit(self, taken: int, division: Division) -> None:
        while self.cursor.passes < self._pass_of_step:
            self.cursor.end_pass()
        self.cursor.commit(taken)
        if self._ends:
            self.cursor.end_pass()

    def evaluation(
        self, *, rank: int, world_size: int, batch: int, workers: int, seen: tuple[int, int] | None = None
    ) -> Iterator[Any]:
        first, length = seen or (0, 0)
        items = (item for index, item in enumerate(self.dataset) if not first <= index < first + length)
        for number in count():
            whole = list(islice(items, batch))
            if not whole:
                return
            if number % world_size == rank:
                yield self._collate(whole)

    def first_samples(self, number: int, *, behind: int = 0) -> Iterator[Any]:
        yield self._collate(first_items(self.dataset, number, behind=behind))


def _as_it_is(item: Any) -> Any:
    return item


def batch_source(
    dataset: Any, *, shuffle: bool, seed: int, sampler: Iterable[int] | Sampler[int] | None, options: dict[str, Any]
) -> BatchSource:
    """Return the source for a dataset of either kind; raise InvalidTraining for what fits neither."""
    if not isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__getitem__"):
            raise InvalidTraining(
                f"{type(dataset).__name__} has no __getitem__ and is not an IterableDataset; AdaptiveDataLoader "
                "needs a map-style dataset or an IterableDataset"
            )
        return IndexedSource(dataset, shuffle=shuffle, seed=seed, sampler=sampler, options=options)
    if shuffle or sampler is not None:
        raise InvalidTraining(
            f"{type(dataset).__name__} is an IterableDataset, which sets its own order; leave out shuffle= and "
            "sampler=, and shuffle within the dataset (its set_epoch, if it has one, is called with the number of "
            "the pass)"
        )
    workers = options.pop("num_workers", 0)
    if workers > 1:
        return PartedSource(dataset, workers=workers, options=options)
    return StreamSource(dataset, seed=seed, workers=workers, options=options)


def checksum_of(item: Any) -> int:
    """16 bits of a sample's content, as far as that can be told; of large arrays the beginning."""
    return short_checksum(b"".join(_content(item, 0)))


_MOST_BYTES = 1024


def _content(item: Any, depth: int) -> Iterator[bytes]:
    if depth > _DEEPEST:
        return
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu()
        item = item.view(torch.uint8) if item.dtype is torch.bfloat16 and item.dim() else item
        item = item.numpy() if item.layout is torch.strided and item.dtype is not torch.bfloat16 else None
    if isinstance(item, np.ndarray):
        yield b"" if item.dtype.hasobject else item.ravel()[:_MOST_BYTES].tobytes()
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from _content(key, depth + 1)
            yield from _content(value, depth + 1)
    elif isinstance(item, list | tuple):
        for value in item[:_MOST_BYTES]:
            yield from _content(value, depth + 1)
    elif isinstance(item, bytes):
        yield item[:_MOST_BYTES]
    elif isinstance(item, bool | int | float | complex | str | np.generic):
        yield repr(item)[:_MOST_BYTES].encode(errors="replace")


_DEEPEST = 8
