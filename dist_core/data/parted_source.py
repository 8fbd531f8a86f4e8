"""Batches from an iterable dataset of which each data worker reads a part, as torch's data loader would have it.

A micro-batch comes from one part, and the last one of a part may be short, as it is there. Because parts end at
different places, replicas agree at each step on how many samples it has. Workers keep what they have read until a step
with it counts, so that nothing is read twice when the batch size changes; a part that another replica goes on with is
read again up to its position.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, count, islice, repeat
from typing import Any, Final, NamedTuple, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from dist_core.data.order import Division, LoadedStep, PartedCursor, StepPlan, split_evenly
from dist_core.errors import InvalidTraining
from dist_core.torch_private import PartInfo, reading_as

_SKIPPED_AT_ONCE = 1024
_NO_PART: Final = -1


class _Reading(NamedTuple):
    """One time that a stream is read: a pass of training, or an evaluation. Workers keep what they have read of it."""

    number: int
    """Number of the evaluation."""
    num_parts: int
    epoch: int | None
    """Argument for ``set_epoch``, if it is called."""
    drop_last: bool = False
    """Leave out what is less than asked for at the end of a part."""
    left_out: tuple[tuple[int, int, int], ...] = ()
    """Part, first and end of samples that are not given out."""


class _Request(NamedTuple):
    """Samples that a worker is to read next: this many of a part, from ``position`` on."""

    reading: _Reading
    part: int
    position: int
    samples: int
    keep_from: int
    """Samples from here on may be asked for again."""


class _Chunk(NamedTuple):
    batch: Any
    """None without samples."""
    part: int
    samples: int
    ended: bool
    """No sample of this part comes after these."""


class _OpenPart:
    """A part as far as it has been read, in the worker that reads it."""

    def __init__(self, part: int, info: PartInfo, reading: _Reading, begin: Callable[[int], Any] | None) -> None:
        self._info = info
        self._kept: deque[Any] = deque()
        self._first = 0
        """Position of the first sample that is kept."""
        self._is_read_out = False
        dataset: Any = info.dataset
        with reading_as(info):
            if begin is not None:
                begin(part)
            if reading.epoch is not None and hasattr(dataset, "set_epoch"):
                dataset.set_epoch(reading.epoch)
            self._samples = iter(dataset)
        for index, first, end in reading.left_out:
            if index == part:
                self._samples = chain(islice(self._samples, first), islice(self._samples, end - first, None))

    @property
    def first(self) -> int:
        return self._first

    def read(self, position: int, number: int, keep_from: int) -> tuple[list[Any], bool]:
        """Return samples from ``position`` on, and whether they are the last ones."""
        while not self._is_read_out and self._end < position:
            self._forget_before(min(keep_from, self._end))
            self._read_on(min(_SKIPPED_AT_ONCE, position - self._end))
        # One more, to see whether it is there.
        self._read_on(position + number + 1 - self._end)
        self._forget_before(min(keep_from, self._end))
        start = position - self._first
        samples = list(islice(self._kept, start, start + number))
        return samples, self._is_read_out and self._end <= position + number

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def _read_on(self, number: int) -> None:
        if number <= 0 or self._is_read_out:
            return
        with reading_as(self._info):
            samples = list(islice(self._samples, number))
        self._is_read_out = len(samples) < number
        self._kept.extend(samples)
        if samples and self._info.num_workers > 1 and not self._info.was_asked:
            kind = type(self._info.dataset).__name__
            raise InvalidTraining(
                f"{kind} yields samples without calling torch.utils.data.get_worker_info(), so each of "
                f"{self._info.num_workers} data workers would yield all of them. Let {kind}.__iter__ call "
                "get_worker_info() and take every num_workers-th file or sample, starting at the worker's id; or "
                "set num_workers=1"
            )

    def _forget_before(self, position: int) -> None:
        while self._first < position:
            self._kept.popleft()
            self._first += 1


class _PartReader(Dataset[Any]):
    """Answers requests with collated samples. Each worker has one, with the parts that it reads."""

    def __init__(self, dataset: IterableDataset[Any], collate: Callable[[list[Any]], Any], begin: Any) -> None:
        self.dataset = dataset
        self._collate, self._begin = collate, begin
        self._reading: _Reading | None = None
        self._open: dict[int, _OpenPart] = {}

    def __getitem__(self, request: _Request) -> _Chunk:
        if request.part == _NO_PART:
            return _Chunk(None, _NO_PART, 0, ended=False)
        if request.reading != self._reading:
            self._reading, self._open = request.reading, {}
        part = self._open.get(request.part)
        if part is None or request.position < part.first:
            part = self._open[request.part] = self._opened(request)
        samples, ended = part.read(request.position, request.samples, request.keep_from)
        if request.reading.drop_last and len(samples) < request.samples:
            samples = []
        batch = self._collate(samples) if samples else None
        return _Chunk(batch, request.part, len(samples), ended)

    def _opened(self, request: _Request) -> _OpenPart:
        worker = get_worker_info()
        dataset = self.dataset if self._begin is None and not self._open else self._copied()
        seed = 0 if worker is None else worker.seed - worker.id + request.part
        info = PartInfo(id=request.part, num_workers=request.reading.num_parts, seed=seed, dataset=dataset)
        return _OpenPart(request.part, info, request.reading, self._begin)

    def _copied(self) -> IterableDataset[Any]:
        """Parts that one process reads in turns may not share a file, a counter, or what its start has set."""
        try:
            return copy.deepcopy(self.dataset)
        except Exception as error:
            kind = type(self.dataset).__name__
            raise InvalidTraining(
                f"{kind} cannot be copied ({error}), but a data worker that reads several parts of it in turn needs "
                f"a copy for each part. Open what cannot be copied in {kind}.__iter__, or set num_workers=1"
            ) from error


class _Requests:
    """Sampler whose requests are thought of while the loop runs."""

    def __init__(self) -> None:
        self.coming: Iterator[_Request] = iter(())

    def __iter__(self) -> Iterator[_Request]:
        return self.coming


class _Readers:
    """A data loader over the parts: a worker has those parts that are given to it by number."""

    def __init__(self, reader: _PartReader, workers: int, options: dict[str, Any], *, stay: bool) -> None:
        self._workers = workers
        self._requests = _Requests()
        options = {**options, "persistent_workers": stay, "num_workers": workers, "batch_size": None}
        sampler = cast("Any", self._requests)
        self._loader: DataLoader[Any] = DataLoader(reader, sampler=sampler, collate_fn=_as_it_is, **options)

    def chunks(
        self,
        reading: _Reading,
        starts: dict[int, int],
        sizes: Iterator[int],
        *,
        stride: int,
        kept: Sequence[int] | None = None,
    ) -> Iterator[_Chunk]:
        """Chunks of parts in turns until all have ended, of the given sizes or less; empty ones tell of an end.

        ``stride``: every so many parts are one replica's. ``kept``: of each part, from where on it may be asked for
        again; None where nothing is.
        """
        ended: set[int] = set()
        self._requests.coming = _ask(self._workers, reading, dict(starts), sizes, stride, ended, kept)
        for chunk in self._loader:
            if chunk.ended:
                ended.add(chunk.part)
            if chunk.part != _NO_PART:
                yield chunk


class PartedSource:
    """Source of samples from an iterable dataset that several workers of each replica read in parts."""

    order_fingerprint = 0

    def __init__(self, dataset: IterableDataset[Any], *, workers: int, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self.num_samples: int | None = len(cast("Sized", dataset)) if hasattr(dataset, "__len__") else None
        self.cursor = PartedCursor()
        self._collate = options.pop("collate_fn", None) or default_collate
        self._reader = _PartReader(dataset, self._collate, options.pop("worker_init_fn", None))
        self.workers = workers
        """Processes of this replica."""
        self._stays = bool(options.pop("persistent_workers", False))
        options.pop("batch_size", None)
        self._options = options
        self._evaluators = _Readers(self._reader, workers, options, stay=self._stays)
        self._trainers: _Readers | None = None
        self._evaluations = count()
        self._taken: list[int] = []
        """Samples taken of each part in the step that is under way."""
        self._ends: list[bool] = []
        self._spare: tuple[Any, int] | None = None
        """A batch for a replica that has no samples, and must take part all the same."""

    def begin_loop(self) -> None:
        if self._trainers is None or not self._stays:
            # Workers see the dataset as it is when they start. Within a loop they stay, whatever the batch size.
            self._trainers = _Readers(self._reader, self.workers, self._options, stay=True)

    def end_loop(self) -> None:
        if not self._stays:
            self._trainers = None

    def steps(self, division: Division) -> Iterator[LoadedStep]:
        """Until the pass ends, or parts go over to another replica."""
        assert self._trainers is not None
        cursor = self.cursor
        cursor.divide(division.world_size, division.stream_workers)
        passes, owners = cursor.passes, list(cursor.owners)
        chunks = self._trainers.chunks(
            _Reading(0, cursor.num_parts, passes, division.drop_last),
            {part: cursor.positions[part] for part in cursor.parts_of(division.rank)},
            (size for turn in count() for size in _sizes(division, turn)),
            stride=cursor.first_world_size,
            kept=cursor.positions,
        )
        step = division.first_step
        for turn in count():
            chunks_taken, ends = self._take(chunks, _sizes(division, turn))
            parts = cursor.num_parts
            counts, most = [0] * parts, max(1, division.accumulation) + 1
            for chunk in chunks_taken:
                counts[chunk.part] += chunk.samples
            passes_taken = [float(len(chunks_taken) == number + 1) for number in range(most)]
            agreed = division.agree([*counts, *(float(part in ends) for part in range(parts)), *passes_taken])
            if agreed is None:
                return
            self._taken = [round(each) for each in agreed[:parts]]
            self._ends = [bool(round(each)) for each in agreed[parts : 2 * parts]]
            if any(self._taken):
                # The body of the loop runs as often on all replicas.
                number = max(index + 1 for index, replicas in enumerate(agreed[2 * parts :]) if round(replicas))
                yield self._loaded(chunks_taken, division, step, number)
                step += 1
            else:
                division.note_round()
                self._advance()
            if cursor.passes != passes or cursor.owners != owners:
                return

    def _take(self, chunks: Iterator[_Chunk], sizes: Sequence[int]) -> tuple[list[_Chunk], set[int]]:
        """Return this replica's chunks for a step, and the parts that were found to end."""
        taken: list[_Chunk] = []
        ends: set[int] = set()
        for chunk in chunks if sizes else ():
            if chunk.ended:
                ends.add(chunk.part)
            if chunk.samples:
                taken.append(chunk)
            if len(taken) == len(sizes):
                break
        return taken, ends

    def _loaded(self, mine: list[_Chunk], division: Division, step: int, number: int) -> LoadedStep:
        total, local = sum(self._taken), sum(chunk.samples for chunk in mine)
        owners = {owner for owner, taken in zip(self.cursor.owners, self._taken, strict=True) if taken}
        batches = [(chunk.batch, chunk.samples) for chunk in mine]
        if batches:
            # What is padded counts nothing, and stands before what counts.
            batches = [(batches[-1][0], 0)] * (number - len(batches)) + batches
            self._spare = batches[-1]
        else:
            batches = [self._spare or (self._collate(list(islice(iter(self.dataset), 1))), 1)] * number
        plan = StepPlan(
            micro_batches=tuple(np.arange(number) for _, number in batches),
            global_batch=total,
            weight=local / total,
            num_parts=len(owners),
        )
        # A short step has parts of different sizes, of which the noise scale is not measured.
        measures = division.measures(step) and total == division.global_batch
        return LoadedStep(plan, [batch for batch, _ in batches], measures)

    def commit(self, taken: int, division: Division) -> None:
        assert taken == sum(self._taken)
        self._advance()

    def _advance(self) -> None:
        self.cursor.advance(self._taken, self._ends)
        if not self.cursor.is_over:
            return
        if not self.cursor.position:
            raise InvalidTraining(
                "the iterable dataset yielded no batch in a whole pass; it must yield at least one sample, or one "
                "whole batch with drop_last=True"
            )
        self.cursor.end_pass()

    def evaluation(
        self, *, rank: int, world_size: int, batch: int, workers: int, seen: tuple[int, int] | None = None
    ) -> Iterator[Any]:
        number, cursor = next(self._evaluations), self.cursor
        reading, stride = _Reading(number, workers * world_size, None), world_size
        if seen is not None:
            # In the order of training, and without the step that is under way.
            taken = zip(cursor.positions, self._taken, strict=True)
            left_out = tuple((part, first, first + length) for part, (first, length) in enumerate(taken))
            reading = _Reading(number, cursor.num_parts, cursor.passes, left_out=left_out)
            stride = cursor.first_world_size
        mine = dict.fromkeys(range(rank, reading.num_parts, world_size), 0)
        for chunk in self._evaluators.chunks(reading, mine, repeat(batch), stride=stride):
            if chunk.samples:
                yield chunk.batch

    def first_samples(self, number: int, *, behind: int = 0) -> Iterator[Any]:
        yield self._collate(first_items(self.dataset, number, behind=behind))


def first_items(stream: Iterable[Any], number: int, *, behind: int) -> list[Any]:
    """Return so many items of a stream behind others, and those at its beginning where it has no more."""
    return list(islice(stream, behind, behind + number)) or list(islice(stream, number))


def _ask(
    workers: int,
    reading: _Reading,
    positions: dict[int, int],
    sizes: Iterator[int],
    stride: int,
    ended: set[int],
    kept: Sequence[int] | None,
) -> Iterator[_Request]:
    """Every worker in turn, as torch gives out what is asked for. Knows of no loader, which would know it again."""
    turns: list[deque[int]] = [deque() for _ in range(workers)]
    for part in positions:
        turns[part // stride % workers].append(part)
    for number in count():
        parts = turns[number % workers]
        while parts and parts[0] in ended:
            parts.popleft()
        if not parts:
            if not any(part not in ended for turn in turns for part in turn):
                return
            yield _Request(reading, _NO_PART, 0, 0, 0)
            continue
        part, size = parts[0], next(sizes)
        parts.rotate(-1)
        yield _Request(reading, part, positions[part], size, positions[part] if kept is None else kept[part])
        positions[part] += size


def _sizes(division: Division, turn: int) -> list[int]:
    """Return this replica's microbatch sizes; replicas take turns at the larger share where shares differ."""
    share = split_evenly(division.global_batch, division.world_size)[(division.rank + turn) % division.world_size]
    passes = min(division.passes(division.first_step + turn) + 1, share)
    return split_evenly(share, passes) if share else []


def _as_it_is(item: Any) -> Any:
    return item
