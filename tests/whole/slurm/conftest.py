from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.slurm import tidy

THIS = "tests/whole/slurm/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if THIS in str(item.path):
            item.add_marker(pytest.mark.slurm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session", autouse=True)
def _needs_slurm() -> None:
    if not os.environ.get("SLURM_CONF"):
        pytest.fail("SLURM_CONF is not set; it names the Slurm that the tests marked 'slurm' run on")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    tidy()
    yield
    tidy()
