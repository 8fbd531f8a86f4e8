"""Slots from nodes and the pods on them: what is free for replicas, as a pure function.

A slot is what one replica requests (`manifest.slot_amounts`). A node has as many as its allocatable resources hold,
less what other people's pods have requested there: those are counted out before anything is given away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from decimal import Decimal
from typing import Any

from trials.kubernetes.names import PLACEHOLDER_LABEL, REPLICA_LABEL, SLOT_LABEL
from trials.kubernetes.pods.manifest import Amounts, amount, requests_of, slot_amounts
from trials.kubernetes.pods.status import belongs_to, is_over, node_of
from trials.kubernetes.settings import ClusterSettings
from trials.launch.base import NodeSlots


def node_slots(
    nodes: Iterable[Mapping[str, Any]],
    pods: Iterable[Mapping[str, Any]],
    settings: ClusterSettings,
    alive: Set[str] | None = None,
) -> list[NodeSlots]:
    """Slots of every node that may be used, in order of name.

    alive: labels of the replicas that have not ended. Pods of others of ours are still there for a while, and until
    they have gone Kubernetes gives what they request to nobody. None: every pod of ours counts as one that runs.

    Nodes that are not ready are left out. On one that is cordoned or tainted only those slots are open that replicas
    stand on: they may stay until somebody drives them off.
    """
    foreign, ours = _by_node(pods, settings, alive)
    wanted = slot_amounts(settings)
    found_nodes = []
    for node in sorted(nodes, key=lambda node: str(node["metadata"]["name"])):
        name = node["metadata"]["name"]
        if not is_usable(node, settings):
            continue
        has = {key: amount(value) for key, value in ((node.get("status") or {}).get("allocatable") or {}).items()}
        total = _how_many(has, wanted)
        used = foreign.get(name, {})
        own_slots = ours.get(name, set())
        free = _how_many({key: value - used.get(key, Decimal(0)) for key, value in has.items()}, wanted)
        room = _how_many_pods(node, name, foreign)
        usable = min(free, room) if is_open(node, settings) else len(own_slots)
        if total <= 0:
            continue
        labels = node["metadata"].get("labels") or {}
        reserved = labels.get(settings.reserved_label, "")
        found_nodes.append(
            NodeSlots(
                node=name,
                slots=total,
                kind=labels.get(settings.kind_label, ""),
                reserved_for=_named(reserved),
                in_use=_closed(total, total - usable, own_slots),
            )
        )
    return _limited(found_nodes, ours, settings.most_slots)


def is_ready(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def is_usable(node: Mapping[str, Any], settings: ClusterSettings) -> bool:
    """Tell whether replicas may run there."""
    labels = node["metadata"].get("labels") or {}
    meant = all(labels.get(key) == value for key, value in settings.node_selector.items())
    return meant and is_ready(node) and not node["metadata"].get("deletionTimestamp")


def is_open(node: Mapping[str, Any], settings: ClusterSettings) -> bool:
    """Tell whether a replica may be started there."""
    spec = node.get("spec") or {}
    if spec.get("unschedulable"):
        return False
    tolerated = (settings.template.get("spec") or {}).get("tolerations") or []
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerated)
        for taint in spec.get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def _by_node(
    pods: Iterable[Mapping[str, Any]], settings: ClusterSettings, alive: Set[str] | None
) -> tuple[dict[str, Amounts], dict[str, set[int]]]:
    """Return what others request on each node, and the slots there that our pods stand for."""
    foreign: dict[str, Amounts] = {}
    ours: dict[str, set[int]] = {}
    for pod in pods:
        if is_over(pod):
            continue
        node = node_of(pod)
        labels = pod["metadata"].get("labels") or {}
        if not node:
            continue
        slot = str(labels.get(SLOT_LABEL, ""))
        lives = alive is None or labels.get(REPLICA_LABEL) in alive
        if slot.isdecimal() and lives and belongs_to(pod, settings):
            ours.setdefault(node, set()).add(int(slot))
        elif PLACEHOLDER_LABEL not in labels:
            used = foreign.setdefault(node, {"pods": Decimal(0)})
            used["pods"] += 1
            for key, value in requests_of(pod).items():
                used[key] = used.get(key, Decimal(0)) + value
    return foreign, ours


def _how_many(has: Mapping[str, Decimal], wanted: Mapping[str, Decimal]) -> int:
    return max(0, min(int(has.get(key, Decimal(0)) // value) for key, value in wanted.items()))


def _how_many_pods(node: Mapping[str, Any], name: str, foreign: Mapping[str, Amounts]) -> int:
    """Return how many more pods a node takes, whatever they request."""
    most = (node.get("status") or {}).get("allocatable", {}).get("pods")
    if most is None:
        return 2**31
    return max(0, int(amount(most)) - int(foreign.get(name, {}).get("pods", Decimal(0))))


def _closed(total: int, count: int, ours: set[int]) -> frozenset[int]:
    """Return the slots that others stand on: first those that none of ours stands on, from the end."""
    order = sorted(range(total), key=lambda slot: (slot in ours, -slot))
    return frozenset(order[: max(0, count)])


def _limited(nodes: Sequence[NodeSlots], ours: Mapping[str, set[int]], most: int | None) -> list[NodeSlots]:
    """No more open slots in all than ``most``; those in use stay open as long as there are enough."""
    if most is None:
        return list(nodes)
    open_slots = [
        (slot not in ours.get(node.node, set()), index, slot)
        for index, node in enumerate(nodes)
        for slot in range(node.slots)
        if slot not in node.in_use
    ]
    kept = set(sorted(open_slots)[: max(0, most)])
    return [
        replace(
            node,
            in_use=frozenset(
                slot
                for slot in range(node.slots)
                if slot in node.in_use or (slot not in ours.get(node.node, set()), index, slot) not in kept
            ),
        )
        for index, node in enumerate(nodes)
    ]


def _named(label: str) -> tuple[str, ...]:
    """Studies that a label's value names, joined by dots; ``team..resnet`` is study resnet of namespace team."""
    return tuple(part.replace("\0", ".") for part in label.replace("..", "\0").split(".") if part)
