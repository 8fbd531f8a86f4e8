"""What a process keeps of a trial's state, others read by the piece: exactly, with its key, not beyond its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_core.errors import PeerLost
from dist_core.larger.divided_state import DividedState, held_shard
from dist_core.state.parts import DIVIDED, merged
from dist_core.state.remote_parts import RemoteParts, RemoteRows, fetched
from dist_core.state.served_parts import SMALL_BYTES, ServedParts
from dist_core.state.states import FunctionState, StateRegistry

WIDE = torch.arange(6000, dtype=torch.float64).reshape(60, 100)


def chunk(rows: torch.Tensor, at: int = 0) -> dict[str, Any]:
    return {"rows": rows, "at": at, "of": [60, *rows.shape[1:]]}


def states() -> dict[str, Any]:
    return {
        "core": {"epoch": 3, "loop_start": None},
        "model": {
            DIVIDED: True,
            "weights": {
                "wide": chunk(WIDE),
                "small": chunk(torch.ones(60, dtype=torch.bfloat16)),
                "scalar": torch.ones(()),
            },
            "optimizers": [
                {"groups": [{"lr": 0.1}], "state": {"wide": {"step": torch.tensor(7.0), "m": chunk(-WIDE)}}}
            ],
        },
        "user": {"average": WIDE.clone()},
    }


@pytest.fixture
def served() -> Iterator[ServedParts]:
    made = ServedParts(states(), "127.0.0.1")
    yield made
    made.close()


_readers: list[RemoteParts] = []


def reader_of(served: ServedParts, key: str | None = None) -> RemoteParts:
    _readers.append(RemoteParts(*served.address, served.key if key is None else key))
    return _readers[-1]


@pytest.fixture(autouse=True)
def closed_readers() -> Iterator[None]:
    yield
    while _readers:
        _readers.pop().close()


def test_what_is_large_and_divided_comes_by_the_piece(served: ServedParts) -> None:
    assert WIDE.nbytes > SMALL_BYTES
    found = reader_of(served).states()
    weights = found["model"]["weights"]
    assert isinstance(weights["wide"]["rows"], RemoteRows) and (weights["wide"]["at"], weights["wide"]["of"]) == (
        0,
        [60, 100],
    )
    assert isinstance(found["model"]["optimizers"][0]["state"]["wide"]["m"]["rows"], RemoteRows)
    # What is small, and what is no part of anything divided, is there at once.
    assert torch.equal(weights["small"]["rows"], torch.ones(60, dtype=torch.bfloat16))
    assert torch.equal(found["user"]["average"], WIDE) and found["core"] == {"epoch": 3, "loop_start": None}
    rows = weights["wide"]["rows"]
    assert len(rows) == 60
    assert torch.equal(rows[10:13], WIDE[10:13]) and torch.equal(rows[:], WIDE)
    assert rows[:0].shape == (0, 100) and rows[70:].shape == (0, 100)
    everything = fetched(found)
    assert torch.equal(everything["model"]["optimizers"][0]["state"]["wide"]["m"]["rows"], -WIDE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_bytes_are_those_of_any_type_of_number(dtype: torch.dtype) -> None:
    values = (torch.arange(9000) % 5).reshape(90, 100).to(dtype)
    kept = ServedParts({"model": {DIVIDED: True, "weights": {"w": chunk(values)}}}, "127.0.0.1")
    try:
        rows = reader_of(kept).states()["model"]["weights"]["w"]["rows"]
        assert rows[3:77].dtype == dtype and torch.equal(rows[3:77], values[3:77])
    finally:
        kept.close()


def test_it_opens_to_its_key_alone(served: ServedParts) -> None:
    for key in ("", "another", served.key + "x"):
        with pytest.raises(PeerLost, match="403"):
            reader_of(served, key).states()
    assert served.key not in repr(served)


def test_what_is_not_there_is_refused(served: ServedParts) -> None:
    reader = reader_of(served)
    with pytest.raises(PeerLost, match="422"):
        reader.rows(99, 0, torch.empty(1, 100, dtype=torch.float64))
    with pytest.raises(PeerLost, match="422"):
        reader.rows(0, 59, torch.empty(2, 100, dtype=torch.float64))
    with pytest.raises(PeerLost, match="404"):
        reader._get("/else")
    # And it goes on answering.
    assert torch.equal(reader.states()["model"]["weights"]["wide"]["rows"][:1], WIDE[:1])


def test_a_holder_that_is_gone_is_a_loss(served: ServedParts) -> None:
    reader = reader_of(served)
    reader.states()
    served.close()
    with pytest.raises(PeerLost, match="is gone"):
        reader_of(served).states()


def test_it_is_there_until_all_have_what_they_need(served: ServedParts) -> None:
    ended = threading.Event()

    def wait() -> None:
        served.until_done(2, or_else=lambda: False, seconds=60.0)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    reader_of(served).done("a")
    # Who says it again is one still.
    reader_of(served).done("a")
    assert not ended.wait(0.3)
    reader_of(served).done("b")
    assert ended.wait(10.0)


def test_it_does_not_wait_for_ever_nor_where_it_is_not_wanted(served: ServedParts) -> None:
    began = time.monotonic()
    served.until_done(1, or_else=lambda: True, seconds=60.0)
    served.until_done(1, or_else=lambda: False, seconds=0.3)
    assert time.monotonic() - began < 30.0


def test_what_nobody_has_registered_does_not_depend_on_its_holder(served: ServedParts) -> None:
    registry = StateRegistry()
    registry.restore(reader_of(served).states())
    registry.change_unclaimed(fetched)
    served.close()
    taken: list[dict[str, Any]] = []
    registry.register("model", FunctionState(dict, taken.append))
    assert torch.equal(taken[0]["weights"]["wide"]["rows"], WIDE)


@settings(max_examples=30, deadline=None)
@given(holders=st.integers(1, 5), members=st.integers(1, 5), rows=st.integers(1, 40))
def test_any_number_of_holders_gives_any_number_of_parts(holders: int, members: int, rows: int) -> None:
    """Weights and the optimizer's state, by rows, as fully_shard divides them."""
    whole, moments = torch.randn(rows, 200, dtype=torch.float64), torch.randn(rows, 200, dtype=torch.float64)

    def part(member: int, count: int, values: torch.Tensor) -> torch.Tensor:
        size = -(-rows // count)
        return values[member * size : (member + 1) * size].clone()

    def state(
        member: int, count: int, *, empty: bool = False
    ) -> tuple[DividedState, torch.nn.Parameter, torch.optim.Adam]:
        weight = torch.nn.Parameter(part(member, count, whole if not empty else torch.zeros_like(whole)))
        optimizer = torch.optim.Adam([weight])
        if not empty:
            optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": part(member, count, moments)}
        held = held_shard(weight, member, count)
        held = type(held)(held.tensor, min(member * -(-rows // count), rows), (rows, 200))
        return DividedState({"w": held}, [optimizer], []), weight, optimizer

    kept = [ServedParts({"m": state(each, holders)[0].state_dict()}, "127.0.0.1") for each in range(holders)]
    try:
        for member in range(members):
            mine, weight, optimizer = state(member, members, empty=True)
            mine.load_state_dict(merged([reader_of(each).states() for each in kept])["m"])
            assert torch.equal(weight, part(member, members, whole))
            if weight.numel():
                assert torch.equal(optimizer.state[weight]["exp_avg"], part(member, members, moments))
    finally:
        for each in kept:
            each.close()
