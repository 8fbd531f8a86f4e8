from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.http:
        yield made
    made.store.close()
