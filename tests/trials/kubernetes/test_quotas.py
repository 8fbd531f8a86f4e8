"""What a namespace's resource quotas leave to its trials."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster_objects import pod, quota
from trials.kubernetes.names import INSTANCE_LABEL
from trials.kubernetes.pods.launcher import namespace_quotas
from trials.kubernetes.settings import ClusterSettings

SETTINGS = ClusterSettings(
    namespace="default", namespaces=("team",), slot={"nvidia.com/gpu": "1", "cpu": "2", "memory": "8Gi"}
)


def ours(name: str, namespace: str = "team", phase: str = "Running") -> dict[str, Any]:
    made = pod(name, "n", labels={INSTANCE_LABEL: "elastune"}, phase=phase)
    made["metadata"]["namespace"] = namespace
    return made


def slots(hard: dict[str, str], used: dict[str, str] | None = None, *pods: dict[str, Any], **spec: Any) -> int | None:
    found = namespace_quotas([quota(hard, used, **spec)], pods, SETTINGS).get("team")
    return None if found is None else found.slots


@pytest.mark.parametrize(
    ("hard", "used", "left"),
    [
        ({"requests.nvidia.com/gpu": "4"}, {}, 4),
        ({"requests.nvidia.com/gpu": "4"}, {"requests.nvidia.com/gpu": "3"}, 1),
        ({"cpu": "7"}, {"cpu": "500m"}, 3),
        ({"requests.memory": "1Ti", "pods": "5"}, {"pods": "2"}, 3),
        ({"limits.memory": "17Gi"}, {}, 2),
        ({"count/pods": "1"}, {"count/pods": "2"}, 0),
        # A slot has no limit of cores, and is no service.
        ({"limits.cpu": "1", "services": "0", "requests.storage": "1Gi"}, {}, None),
    ],
)
def test_the_tightest_of_what_concerns_replicas_counts(
    hard: dict[str, str], used: dict[str, str], left: int | None
) -> None:
    assert slots(hard, used) == left


def test_what_replicas_have_already_is_theirs() -> None:
    pods = [ours("a"), ours("b"), ours("elsewhere", "default"), ours("done", phase="Succeeded"), pod("theirs", "n")]
    assert slots({"requests.nvidia.com/gpu": "3"}, {"requests.nvidia.com/gpu": "2"}, *pods) == 3


def test_a_quota_for_some_pods_only_is_left_to_the_api_server() -> None:
    assert slots({"pods": "1"}, scopes=["BestEffort"]) is None
    assert slots({"pods": "1"}, scopeSelector={"matchExpressions": []}) is None


def test_of_several_quotas_the_tightest_is_named() -> None:
    wide, tight = quota({"pods": "9"}), quota({"pods": "2"})
    tight["metadata"]["name"] = "tight"
    (found,) = namespace_quotas([wide, tight], [], SETTINGS).values()
    assert (found.slots, found.sentence) == (2, "the resource quota 'tight' of namespace team is used up")
