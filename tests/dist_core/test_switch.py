from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_core.generations.decision import Decision, PublishedGeneration, decide_switch


def generation(number: int = 2, join_epoch: int | None = None) -> PublishedGeneration:
    return PublishedGeneration(number=number, members=("a", "b"), nodes=("n", "n"), join_epoch=join_epoch)


def sums(prepared: list[int | None]) -> dict[str, float]:
    numbers = [number for number in prepared if number is not None]
    return {
        "count": float(len(numbers)),
        "total": float(sum(numbers)),
        "squares": float(sum(number**2 for number in numbers)),
    }


def test_all_prepared_alike_commit() -> None:
    decision = decide_switch(**sums([2, 2, 2]), world_size=3, pending=generation(), epoch=0)
    assert decision is Decision.COMMIT


@pytest.mark.parametrize("prepared", [[2, None, 2], [None, None, None], [2, 3, 2], [1, 3, 2]])
def test_anything_less_stays(prepared: list[int | None]) -> None:
    decision = decide_switch(**sums(prepared), world_size=3, pending=generation(), epoch=0)
    assert decision is Decision.STAY


def test_joiners_are_let_in_only_in_the_epoch_they_wait_in() -> None:
    for epoch, expected in ((3, Decision.STAY), (4, Decision.COMMIT), (5, Decision.ABANDON)):
        pending = generation(join_epoch=4)
        assert decide_switch(**sums([2, 2]), world_size=2, pending=pending, epoch=epoch) is expected


@given(st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=1, max_size=5), st.integers(0, 3))
def test_no_rank_commits_alone(prepared: list[int | None], epoch: int) -> None:
    """Whatever ranks have prepared: either all that are in the same epoch commit the same generation, or none does."""
    decisions = [
        decide_switch(
            **sums(prepared),
            world_size=len(prepared),
            pending=None if number is None else generation(number, join_epoch=1),
            epoch=epoch,
        )
        for number in prepared
    ]
    committed = [number for number, decision in zip(prepared, decisions, strict=True) if decision is Decision.COMMIT]
    assert not committed or (len(committed) == len(prepared) and len(set(committed)) == 1)


def test_a_generation_names_each_replica_once_with_its_node() -> None:
    with pytest.raises(ValueError, match="twice"):
        PublishedGeneration(number=1, members=("a", "a"), nodes=("n", "n"), join_epoch=None)
    with pytest.raises(ValueError, match="2 members but 1 nodes"):
        PublishedGeneration(number=1, members=("a", "b"), nodes=("n",), join_epoch=None)
    assert [generation().rank_of(name) for name in ("a", "b", "c")] == [0, 1, None]
    assert generation().num_nodes == 1
