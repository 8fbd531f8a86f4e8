"""An iterable dataset with several workers: each reads its part, every sample is trained once a pass."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.data.order import PartedCursor, StreamCursor
from dist_core.errors import InvalidTraining
from dist_core.trial.current import get_core, reset_core
from tests.support.habits import GROWN, PAIR, RESCALED, Kit, as_trial
from tests.support.ranks import run_ranks

SAMPLES = 61


@pytest.fixture(autouse=True)
def fresh_core() -> Iterator[None]:
    reset_core()
    yield
    reset_core()


class Shards(IterableDataset[int]):
    """Numbers in files of different lengths; a worker reads every n-th file. Reading is written down."""

    def __init__(self, samples: int = SAMPLES, log: Path | None = None) -> None:
        edges = [0, 5, 6, 20, 21, 21, 40, 44, samples]
        self.files = [range(start, end) for start, end in pairwise(edges)]
        self.epoch, self.log = 0, log

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for numbers in self.files[first::step]:
            for number in numbers:
                if self.log is not None:
                    with self.log.open("a") as file:
                        file.write(f"{number} {os.getpid()}\n")
                yield number


class Whole(IterableDataset[int]):
    """Does not look at which part it is to give."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SAMPLES)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.float()


def trained_on(loader: Any, epochs: int = 1, kit: Kit | None = None) -> list[list[int]]:
    """The numbers that this replica trained on, by epoch, and the weight that their steps end with."""
    kit = kit or Kit(elastic=True)
    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    wrapped = kit.wrap(model, optimizer)
    seen: list[list[int]] = []
    for _ in kit.epochs(epochs):
        seen.append([])
        for x in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            seen[-1].extend(x.tolist())
    return seen


def test_each_worker_reads_its_part_and_every_sample_is_trained_once_a_pass(tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = AdaptiveDataLoader(Shards(log=log), batch_size=7, num_workers=2)
    assert [sorted(epoch) for epoch in trained_on(loader, 2)] == [list(range(SAMPLES))] * 2
    lines = [line.split() for line in log.read_text().splitlines()]
    assert Counter(int(number) for number, _ in lines) == dict.fromkeys(range(SAMPLES), 2)
    assert len({pid for _, pid in lines}) == 4


def reads_a_share(log: Path, batch: int) -> tuple[int, list[list[int]], list[float]]:
    seen = trained_on(AdaptiveDataLoader(Shards(log=log), batch_size=batch, num_workers=2))
    return os.getpid(), seen, [float(each) for each in get_core().models.trained()]


@pytest.mark.parametrize("batch", [1, 12])
def test_replicas_share_the_reading(batch: int, tmp_path: Path) -> None:
    """Also with a batch that is smaller than there are replicas."""
    answers = run_ranks(reads_a_share, 2, tmp_path / "log", batch)
    assert {number for _, [seen], _ in answers for number in seen} == set(range(SAMPLES))
    assert answers[0][2] == answers[1][2]
    read = Counter(line.split()[0] for line in (tmp_path / "log").read_text().splitlines())
    # Twice where a replica went on with a part of the other's, or had to look for a batch to take part with.
    assert sum(read.values()) < 1.5 * SAMPLES


class WeightEach(nn.Module):
    """A weight for each sample: which ones moved tells which ones a step was over, on whatever replica."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x]


PASSES = 3


def counted(kit: Kit, *, batch: int = 8, **options: Any) -> tuple[list[int], list[float], int]:
    """How often each sample was in a step that this process saw, the weights in the end, and the passes of the body."""
    model = WeightEach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = kit.wrap(model, optimizer)
    loader = kit.loader(Shards(), batch, num_workers=2, **options)
    steps, bodies = torch.zeros(SAMPLES, dtype=torch.int64), 0
    for _ in kit.epochs(PASSES):
        for x in loader:
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            moved = (before - model.weight.detach()).masked_select(before != model.weight.detach())
            assert not len(moved) or torch.allclose(moved, torch.full_like(moved, 1 / len(moved)))
            steps += before != model.weight.detach()
            bodies += 1
    return steps.tolist(), model.weight.tolist(), bodies


RUNS = [(1, 3), (2, 3), (3, 1), (RESCALED, 1)]


@pytest.mark.parametrize(
    ("replicas", "passes"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in [(GROWN, 3), (PAIR, 1)])]
)
def test_every_sample_is_in_one_step_of_a_pass_whatever_happens_to_replicas(replicas: int, passes: int) -> None:
    answers = [answer for answer in as_trial(counted, replicas, passes) if answer is not None]
    assert answers[0][0] == [PASSES] * SAMPLES
    assert len({tuple(weights) for _, weights, _ in answers}) == 1
    if replicas in (1, 2, 3, PAIR):
        assert len({bodies for _, _, bodies in answers}) == 1


def test_what_was_read_is_not_read_again_when_the_batch_size_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = AdaptiveDataLoader(Shards(200, log=log), batch_size=4, num_workers=2, epoch_size=200)
    loader.autoscale_batch_size(16, gradient_accumulation=True)
    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    wrapped = AdaptiveDataParallel(model, optimizer)
    core = get_core()
    seen: list[int] = []
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (4 + core.position.steps % 3, core.position.steps // 7 % 2)  # type: ignore[method-assign]
            seen.extend(x.tolist())
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if len(seen) > 150:
                break
    assert len(set(seen)) == len(seen)
    read = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(read) == len(set(read))


@pytest.mark.parametrize("data", [list(range(12)), Shards()], ids=["indexed", "stream"])
def test_workers_have_ended_when_their_loop_has(data: Any) -> None:
    """Those that only the garbage collector ends are waited for, five seconds each."""
    before = set(multiprocessing.active_children())
    trained_on(AdaptiveDataLoader(data, batch_size=4, num_workers=2), 2)
    assert set(multiprocessing.active_children()) <= before


def test_an_evaluation_is_read_in_parts_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = AdaptiveDataLoader(Shards(log=log), batch_size=7, num_workers=2)
    for _ in range(2):
        assert sorted(int(number) for batch in loader for number in batch) == list(range(SAMPLES))
    assert len({line.split()[1] for line in log.read_text().splitlines()}) == 4


def evaluates(log: Path) -> list[int]:
    trained_on(AdaptiveDataLoader(Shards(), batch_size=12, num_workers=2))
    with torch.no_grad():
        return [int(number) for x in AdaptiveDataLoader(Shards(log=log), batch_size=7, num_workers=2) for number in x]


def test_replicas_divide_an_evaluation(tmp_path: Path) -> None:
    first, second = run_ranks(evaluates, 2, tmp_path / "log")
    assert sorted([*first, *second]) == list(range(SAMPLES))
    assert len((tmp_path / "log").read_text().splitlines()) == SAMPLES


def train_refused(kind: Any, *arguments: Any, **options: Any) -> str:
    try:
        trained_on(AdaptiveDataLoader(kind(*arguments), batch_size=5, num_workers=2, **options))
    except InvalidTraining as error:
        return str(error)
    return "nothing was refused"


def refusal(kind: Any, *arguments: Any, **options: Any) -> str:
    """In a process of its own: the error holds the loader's workers, and Python would wait for each."""
    [words] = run_ranks(partial(train_refused, kind, *arguments, **options), 1)
    return str(words)


def test_a_stream_that_does_not_ask_for_its_part_is_refused() -> None:
    assert re.search(r"Whole yields samples without calling .* or set num_workers=1", refusal(Whole))


class Range(IterableDataset[int]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.start, self.end = 0, samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def narrow(_: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    dataset: Any = worker.dataset
    samples, share = dataset.end, -(-dataset.end // worker.num_workers)
    dataset.start, dataset.end = worker.id * share, min(samples, (worker.id + 1) * share)


def narrowed() -> list[list[int]]:
    return trained_on(AdaptiveDataLoader(Range(), batch_size=5, num_workers=2, worker_init_fn=narrow))


def test_what_divides_a_stream_may_be_the_start_of_its_workers() -> None:
    answers = run_ranks(narrowed, 2)
    assert {number for [seen] in answers for number in seen} == set(range(SAMPLES))


def test_drop_last_leaves_out_the_short_rest_of_each_part() -> None:
    [seen] = trained_on(AdaptiveDataLoader(Range(), batch_size=9, num_workers=2, worker_init_fn=narrow, drop_last=True))
    # 31 and 30 samples.
    assert len(seen) == len(set(seen)) == 54


def test_a_stream_that_gives_nothing_is_refused() -> None:
    assert "yielded no batch in a whole pass" in refusal(Range, 0, worker_init_fn=narrow)


def test_a_stream_is_read_in_parts_by_all_replicas_or_by_none() -> None:
    whole, parted = StreamCursor(), PartedCursor()
    with pytest.raises(InvalidTraining, match="as a whole, but num_workers is 2 or more here"):
        parted.load_state_dict(whole.state_dict())
    with pytest.raises(InvalidTraining, match="in parts, with several data workers per replica"):
        whole.load_state_dict(parted.state_dict())


def with_workers_of_its_own() -> list[list[int]]:
    workers = 2 + int(os.environ["RANK"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = trained_on(AdaptiveDataLoader(Shards(), batch_size=12, num_workers=workers))
        with torch.no_grad():
            seen.append(
                [int(each) for x in AdaptiveDataLoader(Shards(), batch_size=7, num_workers=workers) for each in x]
            )
    return seen


def test_machines_may_have_different_numbers_of_workers() -> None:
    first, second = run_ranks(with_workers_of_its_own, 2)
    assert {*first[0], *second[0]} == set(range(SAMPLES))
    assert sorted([*first[1], *second[1]]) == list(range(SAMPLES))


class Locked(Range):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_stream_that_cannot_be_copied_is_refused_where_it_has_to_be() -> None:
    words = refusal(Locked, worker_init_fn=narrow)
    assert re.search(r"Locked cannot be copied .* Open what cannot be copied in Locked", words)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=True))
def test_parts_are_read_once_by_somebody_whatever_comes(lengths: list[int], random: Random) -> None:
    """Replicas come and go between steps; nobody is without a part while another one has two."""
    cursor, world = PartedCursor(), 1
    cursor.divide(1, len(lengths))
    while not cursor.is_over:
        if random.random() < 0.5:
            state, cursor = cursor.state_dict(), PartedCursor()
            cursor.load_state_dict(state)
            world = random.randint(1, 4)
        cursor.divide(world, len(lengths))
        left = [cursor.parts_of(rank) for rank in range(world)]
        assert sorted(part for parts in left for part in parts) == [i for i, end in enumerate(cursor.ended) if not end]
        assert min(map(len, left)) > 0 or max(map(len, left)) < 2
        counts, ends = [0] * len(lengths), [False] * len(lengths)
        for part in [random.choice(parts) for parts in left if parts]:
            counts[part] = min(3, lengths[part] - cursor.positions[part])
            ends[part] = cursor.positions[part] + counts[part] == lengths[part]
        cursor.advance(counts, ends)
    assert cursor.positions == lengths
    assert cursor.position == sum(lengths)
