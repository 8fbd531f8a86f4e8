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
    if not os.environ.get("SLURM_CONF") or not os.environ.get("ELASTUNE_TEST_SLURM"):
        pytest.fail(
            "the tests marked 'slurm' kill nodes and the controller: SLURM_CONF names a Slurm of your own, and "
            "ELASTUNE_TEST_SLURM the command that stops and starts its nodes (COMMAND stop-node 2, start-node 2)"
        )


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    tidy()
    yield
    tidy()
