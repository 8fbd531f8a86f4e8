from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.data.order import ElasticCursor, divide, evaluation_share
from dist_core.errors import InvalidTraining


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(1, 400),
    seed=st.integers(0, 2**20),
    trace=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(0, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=25,
    ),
)
def test_every_sample_once_a_pass_under_any_rescales_and_crashes(
    samples: int, seed: int, trace: list[tuple[int, int, int, bool, bool]]
) -> None:
    """Trace entries: world size, batch, accumulation, whether the step crashes, whether the job then restarts."""
    cursor = ElasticCursor(samples, shuffle=True, seed=seed)
    seen = np.zeros(samples, dtype=int)
    position = 0
    while cursor.passes == 0:
        world_size, batch, accumulation, crashes, restarts = trace[position % len(trace)]
        position += 1
        take = cursor.take(batch, avoid_small_rest=bool(seed % 2))
        plans = [
            cursor.plan(take, rank=rank, world_size=world_size, accumulation=accumulation) for rank in range(world_size)
        ]
        assert sum(plan.weight for plan in plans) == pytest.approx(1.0)
        if not crashes or position > 4 * len(trace):
            for plan in plans:
                if plan.weight:
                    for indices in plan.micro_batches:
                        seen[indices] += 1
            cursor.commit(take)
        if restarts:
            state = cursor.state_dict()
            cursor = ElasticCursor(samples, shuffle=True, seed=0)
            cursor.load_state_dict(state)
    assert (seen == 1).all()


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(1, 60), world_size=st.integers(1, 9), accumulation=st.integers(0, 3), least=st.integers(1, 4)
)
def test_no_pass_has_fewer_samples_than_a_model_needs(
    samples: int, world_size: int, accumulation: int, least: int
) -> None:
    taken = np.arange(samples)
    plans = [
        divide(taken, rank=rank, world_size=world_size, accumulation=accumulation, least=least)
        for rank in range(world_size)
    ]
    assert sorted(index for plan in plans if plan.weight for part in plan.micro_batches for index in part) == [*taken]
    assert {len(part) for plan in plans for part in plan.micro_batches} <= set(range(min(least, samples), samples + 1))
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    assert {plan.num_parts for plan in plans} == {sum(plan.weight > 0 for plan in plans)}
    if least == 1:
        assert plans[0].num_parts == min(world_size, samples)


def test_weights_are_shares_of_the_global_batch() -> None:
    cursor = ElasticCursor(100, shuffle=False)
    plans = [cursor.plan(10, rank=rank, world_size=4, accumulation=0) for rank in range(4)]
    assert [sum(map(len, plan.micro_batches)) for plan in plans] == [3, 3, 2, 2]
    assert [plan.weight for plan in plans] == [0.3, 0.3, 0.2, 0.2]


def test_a_replica_without_samples_computes_one_that_does_not_count() -> None:
    cursor = ElasticCursor(2, shuffle=False)
    plan = cursor.plan(2, rank=3, world_size=4, accumulation=1)
    assert plan.weight == 0.0
    assert [len(indices) for indices in plan.micro_batches] == [1], "as many passes as the others"


def test_passes_differ_and_repeat_with_the_seed() -> None:
    first, again, other = (ElasticCursor(50, shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert (first.order() == again.order()).all()
    assert (first.order() != other.order()).any()
    before = first.order()
    first.commit(50)
    assert (first.order() != before).any()


def test_the_rest_of_a_pass_is_never_a_sliver_when_batches_may_vary() -> None:
    cursor = ElasticCursor(93, shuffle=False)
    assert cursor.take(64, avoid_small_rest=True) == 47
    assert cursor.take(64, avoid_small_rest=False) == 64


def test_a_checkpoint_of_other_data_is_refused() -> None:
    state = ElasticCursor(10, shuffle=False).state_dict()
    with pytest.raises(InvalidTraining, match="10 samples, and this loader's has 11"):
        ElasticCursor(11, shuffle=False).load_state_dict(state)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="has 0 samples"):
        ElasticCursor(0, shuffle=False)


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 30))
def test_evaluation_shares_cover_everything_once(samples: int, world_size: int, batch: int) -> None:
    shares = [evaluation_share(samples, rank=rank, world_size=world_size, batch=batch) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(samples))
    if samples >= world_size * batch:
        assert all(share[0] % batch == 0 for share in shares)
