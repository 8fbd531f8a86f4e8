"""Data that is prepared once: what comes back is what was given, and each part is made by one of those who want it."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dist_core import prepared
from dist_core.errors import InvalidTraining
from dist_core.preparation.claims import STALE_SECONDS, Claims
from dist_core.preparation.prepare import Part, address_of
from dist_core.preparation.shards import PreparedData, write_shard
from tests.support.prepared_code import PARTS, ROWS, numbers, squares
from tests.support.waiting import until


def rows(count: int = 9) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for index in range(count):
        yield {
            "image": generator.integers(0, 255, (4, 5, 3), dtype=np.uint8),
            "tokens": generator.integers(0, 9, index, dtype=np.int32),
            "label": np.int64(index),
            "weight": index / 2,
            "name": f"row {index}",
            "tags": ["a"] * index,
        }


def same(found: Any, expected: Any) -> bool:
    return set(found) == set(expected) and all(
        np.array_equal(found[name], value) and getattr(found[name], "dtype", None) == getattr(value, "dtype", None)
        if isinstance(value, np.ndarray)
        else found[name] == value
        for name, value in expected.items()
    )


# ---------------------------------------------------------------------- rows


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    expected = list(rows())
    for path, some in zip(paths, (expected[:4], [], expected[4:]), strict=True):
        assert write_shard(path, iter(some), what="rows") == len(some)
    data = PreparedData("rows", paths)
    assert len(data) == 9
    assert all(same(data[index], row) for index, row in enumerate(expected))
    assert same(data[-1], expected[-1])
    assert all(same(pickle.loads(pickle.dumps(data))[index], row) for index, row in enumerate(expected))
    with pytest.raises(IndexError, match="has 9 rows, so there is no row 9"):
        data[9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_parts_of_different_kinds_of_numbers_make_one_column(tmp_path: Path) -> None:
    write_shard(tmp_path / "0", iter([{"a": 1, "b": []}]), what="rows")
    write_shard(tmp_path / "1", iter([{"a": 2.5, "b": ["x"]}]), what="rows")
    data = PreparedData("rows", [tmp_path / "0", tmp_path / "1"])
    assert [data[0], data[1]] == [{"a": 1.0, "b": []}, {"a": 2.5, "b": ["x"]}]


def test_a_row_is_a_copy_of_its_own(tmp_path: Path) -> None:
    write_shard(tmp_path / "0", rows(), what="rows")
    data = PreparedData("rows", [tmp_path / "0"])
    data[0]["image"][:] = 7
    data[3]["tokens"][:] = 7
    assert same(data[0], next(rows()))
    assert same(data[3], list(rows())[3])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_of_torchs_takes_them(tmp_path: Path, workers: int) -> None:
    data = prepared("squares", squares, arguments={"folder": str(tmp_path)}, parts=PARTS, folder=tmp_path / "home")
    batches = list(DataLoader(data, 20, num_workers=workers))  # type: ignore[arg-type]  # what it asks of a dataset
    assert [int(each) for batch in batches for each in batch["number"]] == list(range(ROWS))
    assert batches[1]["square"].shape == (20, 2, 3)
    assert float(batches[1]["square"][0, 0, 0]) == 400.0


@pytest.mark.slow
def test_hugging_faces_datasets_takes_the_same_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_shard(tmp_path / "0", rows(), what="rows")
    found = PreparedData("rows", [tmp_path / "0"]).as_datasets()
    assert isinstance(found, datasets.Dataset)
    assert found["name"][:2] == ["row 0", "row 1"]
    assert np.array_equal(found.with_format("numpy")[3]["image"], list(rows())[3]["image"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([{"a": 1}, {"b": 1}], r"a row of \['b'\], but its first row was of \['a'\]"),
        ([{"a": 1}, 3], "a row of int"),
        ([{"a": 1}, {"a": "text"}], "do not fit a column of int64"),
        ([{"a": np.zeros((2, 2))}, {"a": np.zeros((2, 3))}], r"one is float64 of shape \(2, 3\)"),
    ],
)
def test_rows_that_fit_no_table_are_refused(tmp_path: Path, wrong: Any, sentence: str) -> None:
    with pytest.raises(InvalidTraining, match=sentence):
        write_shard(tmp_path / "0", iter(wrong), what="part 0")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- parts and addresses


@given(size=st.integers(0, 300), count=st.integers(1, 40))
def test_the_parts_one_after_another_are_the_whole(size: int, count: int) -> None:
    parts = [Part(index, count) for index in range(count)]
    assert [each for part in parts for each in part.of(size)] == list(range(size))
    assert [each for part in parts for each in part.of("x" * size)] == ["x"] * size
    lengths = [len(part.of(size)) for part in parts]
    assert max(lengths) - min(lengths) <= 1


FACTOR = 2


def helped(part: Part) -> Any:
    yield {"a": helper(part.index)}


def helper(number: int) -> int:
    return number * FACTOR


def test_another_address_for_other_code_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    before = address_of("d", helped, {"size": 1}, 4)
    assert before == address_of("d", helped, {"size": 1}, 4)
    others = {address_of("d", helped, {"size": 2}, 4), address_of("d", helped, {"size": 1}, 5)}
    others.add(address_of("d", squares, {"size": 1}, 4))
    monkeypatch.setitem(globals(), "FACTOR", 3)
    others.add(address_of("d", helped, {"size": 1}, 4))
    monkeypatch.setitem(globals(), "helper", lambda number: number)
    others.add(address_of("d", helped, {"size": 1}, 4))
    assert len(others | {before}) == 6


@pytest.mark.parametrize(
    ("name", "arguments", "parts", "sentence"),
    [
        ("../up", {}, 4, "begins with a letter"),
        ("d", {"a": object()}, 4, "cannot be written as JSON"),
        ("d", {}, 0, "it takes 1 to"),
    ],
)
def test_what_has_no_address_is_refused(tmp_path: Path, name: str, arguments: Any, parts: int, sentence: str) -> None:
    with pytest.raises(InvalidTraining, match=sentence):
        prepared(name, squares, arguments=arguments, parts=parts, folder=tmp_path)


# ---------------------------------------------------------------------- who makes them


def made(folder: Path) -> list[int]:
    return sorted(int(line) for line in (folder / "made").read_text().split())


def started(tmp_path: Path, call: str, words: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """``words``: where it says what it does."""
    code = f"from tests.support import prepared_code as code; print(code.{call})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=words, text=True)


@pytest.mark.slow
def test_each_part_is_made_once_by_all_who_want_it(tmp_path: Path) -> None:
    """Parts take their time, so that several are made at once."""
    home, call = tmp_path / "home", f"by_process({str(tmp_path / 'home')!r}, {str(tmp_path)!r}, 0.05)"
    several = [started(tmp_path, call) for _ in range(3)]
    for each in several:
        out, errors = each.communicate(timeout=60)
        assert out.strip() == str(list(range(ROWS))), errors
    assert made(tmp_path) == list(range(PARTS))
    before = prepared(
        "squares", squares, arguments={"folder": str(tmp_path), "seconds": 0.05}, parts=PARTS, folder=home
    )
    assert numbers(before) == list(range(ROWS))
    assert made(tmp_path) == list(range(PARTS))
    assert not list(home.rglob("*.claim")) and not list(home.rglob("*.partial"))


@pytest.mark.slow
def test_what_a_killed_process_was_making_is_made_by_another(tmp_path: Path) -> None:
    call = f"one_that_gets_stuck({str(tmp_path / 'home')!r}, {str(tmp_path)!r})"
    first = started(tmp_path, call)
    until(lambda: (tmp_path / "stuck").exists())
    said = tmp_path / "second.log"
    with open(said, "w") as words:
        second = started(tmp_path, call, words=words)
    until(lambda: "waits for data 'stuck': other processes are making the last 1 of 12 parts" in said.read_text())
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    out, _ = second.communicate(timeout=STALE_SECONDS - 5)
    # Gloo of older releases speaks there, too.
    assert out.splitlines()[-1] == str(list(range(ROWS))), said.read_text()
    assert made(tmp_path) == sorted([*range(PARTS), 3])


def test_a_claim_of_another_machine_holds_until_nobody_touches_it(tmp_path: Path) -> None:
    claims, path = Claims(tmp_path), tmp_path / "a.claim"
    path.write_text('{"host": "elsewhere", "pid": 1, "began": 0}')
    with claims.holding("a") as mine:
        assert not mine
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    with claims.holding("a") as mine:
        assert mine
        with claims.holding("a") as again:
            assert not again
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- limits


def test_data_takes_no_more_than_it_may(tmp_path: Path) -> None:
    with pytest.raises(InvalidTraining, match="but most_bytes is 4000; make its rows smaller, or raise most_bytes"):
        prepared("s", squares, arguments={"folder": str(tmp_path)}, parts=PARTS, folder=tmp_path / "h", most_bytes=4000)
    shards = list((tmp_path / "h").rglob("*.arrow"))
    assert shards and sum(path.stat().st_size for path in shards) <= 4000


def test_a_full_disk_loses_nothing_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, 0

    def fails_at_the_fourth(*paths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fails_at_the_fourth)
    options: dict[str, Any] = {"arguments": {"folder": str(tmp_path)}, "parts": PARTS, "folder": tmp_path / "h"}
    with pytest.raises(InvalidTraining, match=r"does not fit on the disk of .* Finished parts are kept"):
        prepared("s", squares, **options)
    assert len(list((tmp_path / "h").rglob("*.arrow"))) == 3
    assert numbers(prepared("s", squares, **options)) == list(range(ROWS))
    assert len(made(tmp_path)) == PARTS + 1
