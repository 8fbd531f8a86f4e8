"""The best cuts, against every possible one."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.errors import InvalidTraining
from dist_core.partition.balance import Partition, PipelineTerms, partition, partition_at
from dist_core.partition.blocks import BlockCosts, StageDevice, tied_together


def block(name: str, seconds: float, **more: Any) -> BlockCosts:
    return BlockCosts(name=name, forward_seconds=seconds / 3.0, backward_seconds=seconds * 2.0 / 3.0, **more)


def chain(*seconds: float) -> list[BlockCosts]:
    return [block(f"b{index}", each) for index, each in enumerate(seconds)]


def equal(count: int, **more: Any) -> list[StageDevice]:
    return [StageDevice(**more) for _ in range(count)]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[BlockCosts], list[StageDevice], PipelineTerms, list[tuple[str, str]]]:
    size = draw(st.integers(3, 8))
    whole = st.integers(0, 20)
    blocks = [
        block(
            f"b{index}",
            float(draw(st.integers(1, 20))),
            parameter_bytes=draw(whole),
            activation_bytes=draw(whole),
            output_bytes=draw(whole),
        )
        for index in range(size)
    ]
    device = st.builds(
        StageDevice, speed=st.sampled_from([1.0, 2.0]), memory_bytes=st.sampled_from([80.0, 200.0, math.inf])
    )
    devices = draw(st.lists(device, min_size=1, max_size=min(3, size)))
    terms = PipelineTerms(
        microbatches=draw(st.integers(len(devices), 6)),
        schedule=draw(st.sampled_from(["simple", "1f1b"])),
        link_bytes_per_second=draw(st.sampled_from([1.0, 10.0, math.inf])),
        memory_weight=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
    )
    tie = draw(st.none() | st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    ties = [] if tie is None else [(f"b{tie[0]}", f"b{tie[1]}")]
    return blocks, devices, terms, ties


def by_trying_all(
    blocks: list[BlockCosts], devices: list[StageDevice], terms: PipelineTerms, ties: list[tuple[str, str]]
) -> float:
    """The least cost, written down once more and without a table."""
    size, stages = len(blocks), len(devices)
    total_seconds = sum(each.seconds for each in blocks)
    total_memory = sum(4.0 * b.parameter_bytes + terms.in_flight(0, stages) * b.activation_bytes for b in blocks)
    least = math.inf
    for inner in combinations(range(1, size), stages - 1):
        edges = [0, *inner, size]
        where = {b.name: s for s, (i, j) in enumerate(pairwise(edges)) for b in blocks[i:j]}
        if any(where[first] != where[second] for first, second in ties):
            continue
        for order in permutations(devices):
            worst = 0.0
            for index, ((i, j), device) in enumerate(zip(pairwise(edges), order, strict=True)):
                seconds = sum(b.seconds for b in blocks[i:j]) / device.speed
                seconds += 2.0 * blocks[j - 1].output_bytes / terms.link_bytes_per_second if j < size else 0.0
                in_flight = terms.in_flight(index, stages)
                memory = sum(4.0 * b.parameter_bytes + in_flight * b.activation_bytes for b in blocks[i:j])
                if memory > device.memory_bytes:
                    worst = math.inf
                weight = terms.memory_weight
                cost = seconds
                if weight > 0.0:
                    cost = (1.0 - weight) * seconds / (total_seconds / stages)
                    cost += weight * memory / max(total_memory / stages, 1e-30)
                worst = max(worst, cost)
            least = min(least, worst)
    return least


def cost_of(found: Partition, blocks: list[BlockCosts], terms: PipelineTerms) -> float:
    stages, weight = len(found.stages), terms.memory_weight
    if weight == 0.0:
        return found.slowest_seconds
    seconds = sum(each.seconds for each in blocks) / stages
    memory = sum(4.0 * b.parameter_bytes + terms.in_flight(0, stages) * b.activation_bytes for b in blocks) / stages
    return max(
        (1.0 - weight) * stage.seconds / seconds + weight * stage.memory_bytes / max(memory, 1e-30)
        for stage in found.stages
    )


@settings(max_examples=300)
@given(pipelines())
def test_no_other_partition_is_better(
    pipeline: tuple[list[BlockCosts], list[StageDevice], PipelineTerms, list[tuple[str, str]]],
) -> None:
    blocks, devices, terms, ties = pipeline
    expected = by_trying_all(blocks, devices, terms, ties)
    if math.isinf(expected):
        with pytest.raises(InvalidTraining):
            partition(blocks, devices, terms, ties=ties)
        return
    found = partition(blocks, devices, terms, ties=ties)
    assert cost_of(found, blocks, terms) == pytest.approx(expected)
    assert [each for stage in found.stages for each in stage.blocks] == blocks
    assert sorted(map(repr, (stage.device for stage in found.stages))) == sorted(map(repr, devices))
    assert all(stage.memory_bytes <= stage.device.memory_bytes for stage in found.stages)
    assert found.slowest_seconds >= found.bound_seconds * (1.0 - 1e-9)
    again = partition_at(blocks, found.cuts, [stage.device for stage in found.stages], terms)
    assert again.stages == found.stages


def test_of_equally_fast_ones_the_most_even_is_taken() -> None:
    """The last block is the slowest stage whatever the others do."""
    found = partition(chain(1, 1, 1, 1, 10), equal(3), PipelineTerms(microbatches=4))
    assert found.cuts == ("b2", "b4")


def test_a_slow_device_gets_less_and_the_place_where_it_does_least_harm() -> None:
    devices = [StageDevice(name="old", speed=0.5), StageDevice(name="new"), StageDevice(name="new, too")]
    found = partition(chain(1, 4, 1, 3, 1), devices, PipelineTerms(microbatches=4))
    assert found.slowest_seconds == 5.0
    assert {stage.device.name for stage in found.stages} == {"old", "new", "new, too"}


def test_early_stages_keep_more_microbatches() -> None:
    blocks = [block(f"b{index}", 1.0, activation_bytes=10) for index in range(4)]
    roomy = partition(blocks, equal(2), PipelineTerms(microbatches=8))
    assert [stage.memory_bytes for stage in roomy.stages] == [40.0, 20.0]
    tight = partition(blocks, equal(2, memory_bytes=30), PipelineTerms(microbatches=8))
    assert [len(stage.blocks) for stage in tight.stages] == [1, 3]
    with pytest.raises(InvalidTraining, match="no partition into 2 stages fits"):
        partition(blocks, equal(2, memory_bytes=100), PipelineTerms(microbatches=8, schedule="simple"))


def test_memory_may_count_for_more_than_time() -> None:
    blocks = [
        block("embedding", 1.0, parameter_bytes=100),
        *(block(f"b{i}", 2.0, parameter_bytes=10) for i in range(6)),
    ]
    fast = partition(blocks, equal(2), PipelineTerms(microbatches=4))
    even = partition(blocks, equal(2), PipelineTerms(microbatches=4, memory_weight=1.0))
    assert fast.slowest_seconds < even.slowest_seconds
    assert max(each.memory_bytes for each in even.stages) < max(each.memory_bytes for each in fast.stages)


@pytest.mark.parametrize(
    ("ties", "ranges"),
    [
        ([("b0", "b2")], [(0, 2)]),
        ([("b2", "b0"), ("b1", "b3")], [(0, 3)]),
        ([("b0", "b1"), ("b1", "b2")], [(0, 1), (1, 2)]),
        ([("b3", "b3")], []),
    ],
)
def test_what_is_tied_stays_together(ties: list[tuple[str, str]], ranges: list[tuple[int, int]]) -> None:
    assert tied_together(chain(1, 1, 1, 1), ties) == ranges


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: partition(chain(1, 1), equal(3), PipelineTerms(microbatches=4)),
            "2 blocks cannot be cut into 3",
        ),
        (lambda: partition(chain(1, 1), equal(2), PipelineTerms(microbatches=1)), "microbatches is 1 for 2 stages"),
        (
            lambda: partition(chain(1, 1, 1), equal(2), PipelineTerms(microbatches=2), ties=[("b0", "b2")]),
            "into at most 1 stages, because blocks that share a parameter",
        ),
        (
            lambda: partition(
                [block("wide", 1, parameter_bytes=10**9), block("b", 1)],
                equal(2, memory_bytes=1e9),
                PipelineTerms(microbatches=2),
            ),
            "the block 'wide' alone needs 4 GB and the largest device has 1 GB",
        ),
        (
            lambda: partition_at(chain(1, 1), ["b7"], equal(2), PipelineTerms(microbatches=2)),
            "'b7', which is not one of the blocks after the first; the blocks are b0, b1",
        ),
        (
            lambda: partition_at(chain(1, 1, 1), ["b2", "b1"], equal(3), PipelineTerms(microbatches=3)),
            "in the order of the blocks",
        ),
        (lambda: PipelineTerms(microbatches=0), "microbatches is 0"),
        (lambda: PipelineTerms(microbatches=1, memory_weight=2.0), "memory_weight is 2.0"),
        (lambda: PipelineTerms(microbatches=1, schedule=cast("Any", "zigzag")), "schedule is 'zigzag'"),
        (lambda: PipelineTerms(microbatches=1, state_factor=0.0), "state_factor is 0.0"),
        (lambda: block("b", math.nan), "forward_seconds of block 'b' is nan"),
        (lambda: StageDevice(speed=0.0), "has speed 0.0"),
    ],
)
def test_what_has_no_partition_is_refused_with_the_reason(call: Any, words: str) -> None:
    with pytest.raises(InvalidTraining, match=words):
        call()
