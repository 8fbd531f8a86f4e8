"""A batch that does not fit into memory, and datasets that are streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.data.source import batch_source
from dist_core.errors import InvalidTraining
from dist_core.trial.current import get_core, reset_core
from dist_core.trial.plain_replica import run_training
from tests.support.small_trials import ConstantGradient, Numbered, Stream, train

pytestmark = pytest.mark.usefixtures("fresh_core")


def run_out_of_memory(above: int, **bounds: Any) -> tuple[list[int], list[float]]:
    """Batch sizes of the steps that counted, and the weight after each; more than ``above`` examples do not fit."""
    core = get_core()
    batches: list[int] = []
    weights: list[float] = []

    def code() -> None:
        model = ConstantGradient()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = AdaptiveDataLoader(Numbered(600), batch_size=8)
        loader.autoscale_batch_size(64, **bounds)
        wrapped = AdaptiveDataParallel(model, optimizer, scaling_rule="none", noise_every=1000)
        for _ in remaining_epochs_until(2):
            for x in loader:
                adaptation = core.adaptation
                assert adaptation is not None
                proposal = (min(core.position.steps + 8, adaptation.bounds.largest_atomic), 0)
                adaptation.proposal = lambda *_, proposal=proposal: proposal  # type: ignore[method-assign]
                if len(x) > above:
                    raise torch.OutOfMemoryError("tried to allocate too much")
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                batches.append(len(x))
                if wrapped.is_last_micro_batch:
                    weights.append(model.weight.item())

    run_training(core, code)
    return batches, weights


def test_running_out_of_memory_lowers_the_bound_and_loses_nothing() -> None:
    batches, weights = run_out_of_memory(20)
    assert 13 <= max(batches) <= 20
    # Each step that counted moved the weight by one: none was lost, none counted twice.
    assert weights == [-float(number + 1) for number in range(len(weights))]
    assert get_core().position.epoch == 2
    assert sum(batches) >= 1200
    # The epoch in which it happened was trained to its end.
    assert get_core().position.progress_shift < 16


def test_a_first_batch_that_does_not_fit_is_divided() -> None:
    batches, weights = run_out_of_memory(5, gradient_accumulation=True)
    assert max(batches) <= 5
    assert weights == [-float(number + 1) for number in range(len(weights))]
    assert get_core().position.epoch == 2


def test_running_out_of_memory_at_the_smallest_batch_is_refused_in_words() -> None:
    with pytest.raises(InvalidTraining, match="out of memory with 8 examples a pass, and no smaller batch is allowed"):
        run_out_of_memory(7, local_bsz_bounds=(8, 64))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_gives_every_sample_once_a_pass(workers: int) -> None:
    loader = AdaptiveDataLoader(Stream(23), batch_size=5, num_workers=workers)
    epochs = train(loader, 3)
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 3
    assert epochs[1][0] == 1
    with pytest.raises(TypeError, match="Stream has no length"):
        len(loader)


def test_a_stream_is_read_once_although_plans_change() -> None:
    stream = Stream(4000)
    loader = AdaptiveDataLoader(stream, batch_size=10, epoch_size=4000)
    loader.autoscale_batch_size(40, gradient_accumulation=True)
    model = ConstantGradient()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    core = get_core()
    seen: list[int] = []
    for _ in remaining_epochs_until(1):
        for x in loader:
            assert core.adaptation is not None
            core.adaptation.proposal = lambda *_: (10 + core.position.steps % 3, core.position.steps // 7 % 2)  # type: ignore[method-assign]
            seen.extend(x.tolist())
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            if len(seen) > 3000:
                break
    assert seen == list(range(len(seen)))
    assert stream.given_out <= len(seen) + 41


def test_a_stream_that_gives_nothing_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="yielded no batch in a whole pass"):
        train(AdaptiveDataLoader(Stream(0), batch_size=5), 1)


def test_drop_last_of_a_stream() -> None:
    assert train(AdaptiveDataLoader(Stream(10), batch_size=4, drop_last=True), 2) == [
        list(range(8)),
        [*range(1, 9)],
    ]


def test_a_sampler_sets_the_order_of_each_pass() -> None:
    weights = [0.0, 1.0, 0.0, 1.0]
    sampler = WeightedRandomSampler(weights, 40, generator=torch.Generator())
    epochs = train(AdaptiveDataLoader(Numbered(4), batch_size=8, sampler=sampler), 2)
    assert [len(epoch) for epoch in epochs] == [40, 40]
    assert {number for epoch in epochs for number in epoch} == {1, 3}
    assert epochs[0] != epochs[1]
    reset_core()
    again = train(AdaptiveDataLoader(Numbered(4), batch_size=8, sampler=WeightedRandomSampler(weights, 40)), 2)
    assert again == epochs


@pytest.mark.parametrize("seen", [(0, 4), (8, 4), (4, 3)])
def test_an_evaluation_of_a_stream_leaves_out_what_it_has_seen_and_nothing_else(seen: tuple[int, int]) -> None:
    source = batch_source(Stream(12), shuffle=False, seed=0, sampler=None, options={})
    batches = source.evaluation(rank=0, world_size=1, batch=4, workers=0, seen=seen)
    found = [int(item) for batch in batches for item in batch]
    assert found == [item for item in range(12) if not seen[0] <= item < sum(seen)]
