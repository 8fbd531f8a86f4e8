from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.cluster.rig import (
    TEAM,
    Installed,
    apply,
    beside_the_nodes_to_kill,
    installed,
    is_terminating,
    kubectl,
    left_behind,
    tidy,
    until,
)

OWN_INSTALLATIONS = "test_installations.py"
"""Its tests install the chart, and have to come before the others share one installation."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/whole/cluster/" in str(item.path)]
    for item in here:
        item.add_marker(pytest.mark.cluster)
        # A cluster of the tests' own has a certificate that nobody has signed.
        item.add_marker(pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning"))
        if item.get_closest_marker("timeout") is None:
            # The last one's includes the uninstallation.
            item.add_marker(pytest.mark.timeout(300))
    order = {id(item): position for position, item in enumerate(items)}
    items.sort(key=lambda item: (item in here and item.path.name != OWN_INSTALLATIONS, order[id(item)]))


@pytest.fixture(scope="session", autouse=True)
def _needs_a_cluster() -> None:
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG is not set; it names the cluster that the tests marked 'cluster' run on")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Elastune on the cluster, for all tests that change nothing of the installation: each ends what it started.

    A scheduler that leads and one that stands by; another namespace whose trials are looked after; nodes that are asked
    for while trials wait for them.
    """
    # Of tests that ran just before, and are tried again.
    until(lambda: not is_terminating(TEAM), 120.0, "the namespace of the last tests is gone")
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
    try:
        with installed(
            tmp_path_factory.mktemp("state"),
            namespaces=[TEAM],
            autoscaling={"enabled": True, "slotsPerNode": 4, "mostNodes": 3},
            scheduler={"replicas": 2, **beside_the_nodes_to_kill()},
        ) as made:
            yield made
        assert left_behind() == "", "an uninstallation leaves nothing"
    finally:
        kubectl("delete", "namespace", TEAM, "--wait=false")


@pytest.fixture(autouse=True)
def _tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends what it starts; one that fails may leave something behind."""
    failed = request.session.testsfailed
    yield
    if "cluster" in request.fixturenames and request.session.testsfailed > failed:
        tidy()
