from __future__ import annotations

import gc
import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run: what fails is the change's doing. `make explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has started this in its background; what the tests start is to hear Ctrl-C all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = ("whole", "tuner_bridge", "dist_core")
"""Folders of tests that start processes; the others are done in moments."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of whose tests a run takes none, by their marks: their imports take seconds."""
    expression = str(config.option.markexpr)
    if not expression or " or " in expression or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    left_out = re.findall(r"\bnot (\w+)", expression)
    marks = re.search(r"^pytestmark = (?:.*?)(?=^\S)", text, re.MULTILINE | re.DOTALL)
    if marks is not None and any(f"mark.{mark}" in marks[0] for mark in left_out):
        return True
    # A folder's conftest.py may mark all tests of the folder.
    beside = collection_path.with_name("conftest.py")
    text += beside.read_text() if beside.exists() else ""
    wanted = re.findall(r"(?<!not )\b(?!not\b|and\b)\w+", expression)
    return not all(f"mark.{mark}" in text for mark in wanted) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those that may take longest, whole sweeps first: none of them is left to run alone at the end."""

    def longest(item: pytest.Item) -> float:
        allowed = item.get_closest_marker("timeout")
        is_slow = item.get_closest_marker("slow") is not None
        return float(allowed.args[0]) if is_slow and allowed is not None and allowed.args else 0.0

    def depth(item: pytest.Item) -> int:
        return next((index for index, name in enumerate(LONGEST_FIRST) if name in item.path.parts), len(LONGEST_FIRST))

    items.sort(key=lambda item: (-longest(item), depth(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All that the tests import is in memory by now and stays: no collection need look at it again."""
    gc.collect()
    gc.freeze()
