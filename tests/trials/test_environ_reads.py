"""Which variables code is taken to have looked at while it was imported."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest

from trials.launch.fork.environ_reads import recorded_environ


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes them all there is; within a test, for pytest sets one before."""

    def only() -> None:
        for name in os.environ:
            monkeypatch.delenv(name)
        for name in ("MINE_A", "MINE_B", "OTHER"):
            monkeypatch.setenv(name, name.lower())

    return only


def copied() -> None:
    kept = os.environ.copy()
    # Not a loop over the variables any more.
    assert [name for name in kept if name.startswith("MINE_")] == ["MINE_A", "MINE_B"]


def looked_at_before() -> None:
    assert os.environ["OTHER"] == "other"
    assert dict(item for item in os.environ.items() if item[0].startswith("MINE_")) == {
        "MINE_A": "mine_a",
        "MINE_B": "mine_b",
    }


CASES: list[tuple[Callable[[], object], set[str]]] = [
    (lambda: os.environ.get("MINE_A"), {"MINE_A"}),
    (lambda: "MISSING" in os.environ, {"MISSING"}),
    (lambda: os.environ.get("MISSING"), {"MISSING"}),
    (lambda: [v for k, v in os.environ.items() if k.startswith("MINE_")], {"MINE_A", "MINE_B"}),
    (lambda: [v for k, v in os.environ.items() if k.startswith(("MINE_", "NOBODYS"))], {"MINE_A", "MINE_B"}),
    (lambda: [os.environ[k] for k in os.environ if k.startswith("MINE_B")], {"MINE_B"}),
    (lambda: [k for k, v in os.environ.items() if v.startswith("m")], {"MINE_A", "MINE_B", "OTHER"}),
    (lambda: dict(os.environ), {"MINE_A", "MINE_B", "OTHER"}),
    (copied, {"MINE_A", "MINE_B", "OTHER"}),
    (looked_at_before, {"MINE_A", "MINE_B", "OTHER"}),
    (lambda: list(os.environ), set()),
]


@pytest.mark.parametrize(("look", "read"), CASES)
def test_what_code_has_looked_at(some: Callable[[], None], look: Callable[[], object], read: set[str]) -> None:
    some()
    reads: dict[str, str | None] = {}
    with recorded_environ(reads):
        look()
    assert reads == {name: os.environ.get(name) for name in read}
    assert all(type(name) is str for name in reads)


def test_names_are_strings_for_whoever_keeps_them(some: Callable[[], None]) -> None:
    some()
    with recorded_environ({}):
        names = list(os.environ)
        assert {**os.environ} == dict(os.environ)
    assert names == ["MINE_A", "MINE_B", "OTHER"]
    assert [type(name) for name in pickle.loads(pickle.dumps(names))] == [str, str, str]
