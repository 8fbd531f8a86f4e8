from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.rig import Installed, beside_the_nodes_to_kill, installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/whole/cluster/" in str(item.path):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session", autouse=True)
def _needs_a_cluster() -> None:
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG is not set; it names the cluster that the tests marked 'cluster' run on")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Elastune on the cluster, for all tests of a file."""
    state: Path = tmp_path_factory.mktemp("state")
    with installed(state, scheduler=beside_the_nodes_to_kill()) as made:
        yield made
