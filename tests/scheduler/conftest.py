from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loop_bench import Bench
from tests.support.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.http:
        yield made
    made.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.store.close()
