"""How many slots a namespace's resource quotas leave to its trials: pure functions.

What a quota says of objects that replicas are not, or of some of its pods only (scopes), is left to the API server: a
pod that it refuses is told of, and tried again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from trials.kubernetes.amounts import Amounts, amount
from trials.kubernetes.pods.manifest import slot_amounts
from trials.kubernetes.pods.status import belongs_to, is_over
from trials.kubernetes.settings import ClusterSettings
from trials.quota import SlotQuota

PLAIN = frozenset({"cpu", "memory", "ephemeral-storage"})
"""A quota may name their requests without saying that it means those."""


def namespace_quotas(
    quotas: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], settings: ClusterSettings
) -> dict[str, SlotQuota]:
    """By namespace; those without a quota that concerns replicas have no entry.

    What replicas have already is theirs: beyond it, as much as the tightest quota leaves.
    """
    room: dict[str, tuple[int, str]] = {}
    slot = slot_amounts(settings)
    for quota in quotas:
        metadata = quota["metadata"]
        found = _room(quota, slot)
        if found is not None:
            namespace = metadata["namespace"]
            room[namespace] = min(room.get(namespace, (found, metadata["name"])), (found, metadata["name"]))
    return {
        namespace: SlotQuota(
            f"namespace {namespace}",
            left + _held(pods, namespace, settings),
            f"the resource quota {name!r} of namespace {namespace} is used",
        )
        for namespace, (left, name) in room.items()
    }


def _room(quota: Mapping[str, Any], slot: Amounts) -> int | None:
    spec, status = quota.get("spec") or {}, quota.get("status") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return None
    used = status.get("used") or {}
    found = [
        max(0, int((amount(hard) - amount(used.get(key, "0"))) // wanted))
        for key, hard in (status.get("hard") or spec.get("hard") or {}).items()
        if (wanted := _wanted(key, slot)) is not None
    ]
    return min(found, default=None)


def _wanted(key: str, slot: Amounts) -> Decimal | None:
    """How much of what a quota counts one replica takes."""
    if key in ("pods", "count/pods"):
        return Decimal(1)
    if key in PLAIN:
        return slot.get(key)
    kind, _, name = key.partition(".")
    if kind == "requests":
        return slot.get(name)
    # A slot's cores are a request and no limit.
    return slot.get(name) if kind == "limits" and name != "cpu" else None


def _held(pods: Iterable[Mapping[str, Any]], namespace: str, settings: ClusterSettings) -> int:
    return sum(
        pod["metadata"].get("namespace") == namespace and not is_over(pod) and belongs_to(pod, settings) for pod in pods
    )
