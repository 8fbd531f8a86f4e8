"""A store of trials on an API server that a test plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.support.fake_cluster import FakeClusterApi
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.settings import ClusterSettings
from trials.spec import TrialSpec

SETTINGS = ClusterSettings(namespace="home", namespaces=("team",))


@contextmanager
def opened(api: FakeClusterApi, clock: Any = lambda: 100.0) -> Iterator[KubernetesTrialStore]:
    with closing(KubernetesTrialStore(api, SETTINGS, clock=clock)) as store:
        yield store


def spec(number: int = 0, study: str = "s") -> TrialSpec:
    return TrialSpec(study=study, number=number, entrypoint="m:f", payload={"x": 1.0, "none": None})
