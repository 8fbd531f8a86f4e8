"""Which slots are free: never one that somebody else has."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster_objects import node, pod
from trials.kubernetes.names import INSTANCE_LABEL, PLACEHOLDER_LABEL, REPLICA_LABEL, SLOT_LABEL
from trials.kubernetes.pods.manifest import requests_of
from trials.kubernetes.pods.nodes import node_slots
from trials.kubernetes.settings import ClusterSettings
from trials.launch.base import NodeSlots

SETTINGS = ClusterSettings(slot={"nvidia.com/gpu": "1"})


def ours(name: str, on: str, slot: int, **fields: Any) -> dict[str, Any]:
    return pod(name, on, gpus=1, labels={INSTANCE_LABEL: "elastune", SLOT_LABEL: str(slot)}, **fields)


def usable(found: NodeSlots) -> set[int]:
    return set(range(found.slots)) - found.in_use


def test_a_node_has_as_many_slots_as_it_has_gpus() -> None:
    (found,) = node_slots([node("a", 4)], [], SETTINGS)
    assert (found.slots, found.in_use) == (4, frozenset())


def test_a_slot_is_all_that_the_clusters_own_template_makes_a_replica_request() -> None:
    beside = {"name": "beside", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    settings = ClusterSettings(template={"spec": {"containers": [{"name": "replica"}, beside]}})
    (found,) = node_slots([node("a", 5)], [pod("theirs", "a", gpus=1)], settings)
    assert (found.slots, len(usable(found))) == (2, 2)


def test_what_others_request_is_counted_out_and_our_own_is_not() -> None:
    pods = [pod("theirs", "a", gpus=2), ours("r", "a", 0), pod("done", "a", gpus=4, phase="Succeeded")]
    (found,) = node_slots([node("a", 4)], pods, SETTINGS)
    assert usable(found) == {0, 1}


def test_a_pod_whose_replica_has_ended_holds_its_slot_until_it_is_gone() -> None:
    pods = [ours("lives", "a", 0), ours("leaves", "a", 1)]
    for each in pods:
        each["metadata"]["labels"][REPLICA_LABEL] = each["metadata"]["name"]
    (found,) = node_slots([node("a", 3)], pods, SETTINGS, {"lives"})
    assert len(usable(found)) == 2
    assert 0 in usable(found)
    (found,) = node_slots([node("a", 3)], pods[:1], SETTINGS, {"lives"})
    assert len(usable(found)) == 3


def test_others_never_close_a_slot_that_a_replica_stands_on_while_another_is_free() -> None:
    pods = [pod("theirs", "a", gpus=3), ours("r", "a", 3)]
    (found,) = node_slots([node("a", 4)], pods, SETTINGS)
    assert usable(found) == {3}


def test_the_scarcest_resource_decides() -> None:
    settings = ClusterSettings(slot={"nvidia.com/gpu": "1", "cpu": "3"})
    (found,) = node_slots([node("a", 8, cpu="8")], [pod("theirs", "a", cpu="2500m")], settings)
    assert (found.slots, len(usable(found))) == (2, 1)


@pytest.mark.parametrize(
    "unusable",
    [
        node("a", ready=False),
        node("a", labels={"pool": "other"}),
        node("a", 0),
    ],
)
def test_nodes_that_take_no_replicas_are_left_out(unusable: dict[str, Any]) -> None:
    settings = ClusterSettings(slot={"nvidia.com/gpu": "1"}, node_selector={"pool": "gpu"})
    unusable["metadata"]["labels"].setdefault("pool", "gpu")
    assert node_slots([unusable], [], settings) == []


@pytest.mark.parametrize(
    "closed",
    [
        node("a", unschedulable=True),
        node("a", taints=[{"key": "x", "effect": "NoSchedule"}]),
        node("a", taints=[{"key": "x", "effect": "NoExecute"}]),
    ],
)
def test_on_a_cordoned_or_tainted_node_replicas_stay_and_none_is_started(closed: dict[str, Any]) -> None:
    (found,) = node_slots([closed], [ours("r", "a", 2)], SETTINGS)
    assert usable(found) == {2}


def test_a_taint_that_the_template_tolerates_or_that_only_warns_is_no_obstacle() -> None:
    tolerant = ClusterSettings(template={"spec": {"tolerations": [{"key": "x", "operator": "Exists"}]}})
    tainted = node("a", taints=[{"key": "x", "value": "1", "effect": "NoSchedule"}])
    warned = node("a", taints=[{"key": "x", "effect": "PreferNoSchedule"}])
    assert len(usable(node_slots([tainted], [], tolerant)[0])) == 4
    assert len(usable(node_slots([warned], [], SETTINGS)[0])) == 4
    other = ClusterSettings(template={"spec": {"tolerations": [{"key": "x", "value": "2"}]}})
    assert usable(node_slots([tainted], [], other)[0]) == set()


def test_labels_tell_kind_and_reservation_and_which_nodes_are_meant() -> None:
    labels = {"nvidia.com/gpu.product": "H100", "elastune.dev/reserved-for": "mine.team..theirs.yours", "pool": "gpu"}
    settings = ClusterSettings(node_selector={"pool": "gpu"})
    (found,) = node_slots([node("a", labels=labels), node("b")], [], settings)
    assert (found.node, found.kind, found.reserved_for) == ("a", "H100", ("mine", "team.theirs", "yours"))


def test_no_more_than_was_allowed_are_open_and_those_in_use_stay() -> None:
    settings = ClusterSettings(most_slots=3)
    found = node_slots([node("a", 4), node("b", 4)], [ours("r", "b", 3)], settings)
    assert sum(len(usable(each)) for each in found) == 3
    assert 3 in usable(found[1])


def test_placeholders_make_way() -> None:
    (found,) = node_slots([node("a", 4)], [pod("p", "a", gpus=4, labels={PLACEHOLDER_LABEL: "true"})], SETTINGS)
    assert len(usable(found)) == 4


def test_an_init_container_counts_when_it_needs_more() -> None:
    document = pod("p", "a", cpu="1")
    document["spec"]["initContainers"] = [{"name": "i", "resources": {"requests": {"cpu": "3"}}}]
    assert requests_of(document)["cpu"] == 3
    stays = {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}}
    document["spec"]["initContainers"] = [stays]
    assert requests_of(document)["cpu"] == Decimal("1.5")
    document["spec"]["resources"] = {"requests": {"cpu": "4"}}
    assert requests_of(document)["cpu"] == 4


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=8),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 8), min_size=1),
)
def test_never_more_slots_are_open_than_the_node_has_left(
    pods: list[tuple[str, int, bool]], gpus: dict[str, int]
) -> None:
    documents = [
        ours(f"p{index}", on, index) if mine else pod(f"p{index}", on, gpus=amount)
        for index, (on, amount, mine) in enumerate(pods)
    ]
    for found in node_slots([node(name, count) for name, count in gpus.items()], documents, SETTINGS):
        theirs = sum(amount for on, amount, mine in pods if on == found.node and not mine)
        assert len(usable(found)) == max(0, gpus[found.node] - theirs)
