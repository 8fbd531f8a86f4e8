"""Status of a pod: whose it is and where, whether it may still start, how it ended. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trials.kubernetes.names import GROUP, INSTANCE_LABEL, label_value
from trials.kubernetes.pods.manifest import CONTAINER
from trials.kubernetes.settings import ClusterSettings
from trials.launch.base import NO_ROOM

HOPELESS = frozenset(
    {"ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
"""Reasons of a waiting container that no patience cures."""
PATIENCE = 10.0
"""Factor on the deadline for what is only slow: an image that is being pulled, a queue."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """A replica that does not run any more, or never will."""

    status: int | None
    why: str = ""
    code: str = "pod_ended"


def read_end(pod: Mapping[str, Any], now: float, *, node_is_lost: bool, deadline_seconds: float) -> PodEnd | None:
    """Return how the pod's replica ended; None while it runs, or may still start."""
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if is_over(pod) or _main_has_ended(status):
        return _ended(pod)
    node = node_of(pod)
    if node_is_lost and phase == "Running":
        return PodEnd(None, f"node {node} no longer answers", "node_lost")
    if phase != "Pending":
        return None
    if pod["metadata"].get("deletionTimestamp"):
        return PodEnd(None, "its pod was deleted before it had started", "cannot_start")
    waits = _why_it_waits(status)
    if _is_held_or_pulls(status):
        deadline_seconds *= PATIENCE
    hopeless = any(reason in HOPELESS for reason, _ in _waiting(status))
    age = now - _seconds(pod["metadata"].get("creationTimestamp"), now)
    if age < (min(deadline_seconds, 5.0) if hopeless else deadline_seconds):
        return None
    code = NO_ROOM if _is_unschedulable(status) else "cannot_start"
    return PodEnd(None, f"its pod could not start on {node} within {age:.0f} s: {waits}", code)


def _main_has_ended(status: Mapping[str, Any]) -> bool:
    """Tell whether the replica's container has ended, also while others of the pod, such as a mesh's, still run."""
    return any(
        container.get("name") == CONTAINER and (container.get("state") or {}).get("terminated")
        for container in status.get("containerStatuses") or ()
    )


def _is_held_or_pulls(status: Mapping[str, Any]) -> bool:
    """Tell whether a queue has not let the pod in yet, or its image is on the way."""
    held = any(condition.get("reason") == "SchedulingGated" for condition in status.get("conditions") or ())
    reasons = {reason for reason, _ in _waiting(status)}
    return held or (bool(reasons) and reasons <= {"ContainerCreating", "PodInitializing"})


def _is_unschedulable(status: Mapping[str, Any]) -> bool:
    return any(condition.get("reason") == "Unschedulable" for condition in status.get("conditions") or ())


def _ended(pod: Mapping[str, Any]) -> PodEnd:
    status = pod.get("status") or {}
    by_cluster = status.get("reason") or ""
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if container.get("name") != CONTAINER or ended is None:
            continue
        code = ended.get("exitCode")
        if ended.get("reason") == "OOMKilled":
            return PodEnd(-9, "its pod ran out of memory", "out_of_memory")
        # A shell reports a signal as 128 + its number.
        result = 128 - code if isinstance(code, int) and code in (137, 139, 134, 135, 136, 132) else code
        return PodEnd(result, _because(status) if by_cluster else "", "evicted")
    # It never ran: the kubelet refused it.
    code = "evicted" if by_cluster == "Evicted" else NO_ROOM if by_cluster.startswith("OutOf") else "cannot_start"
    deleted = "its pod was deleted before it had started" if pod["metadata"].get("deletionTimestamp") else ""
    return PodEnd(None, _because(status) or deleted or "its pod failed", code)


def _because(status: Mapping[str, Any]) -> str:
    return ": ".join(word for word in (status.get("reason"), status.get("message")) if word)[:300]


def _waiting(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    waiting_reasons = []
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            waiting_reasons.append((waiting.get("reason", ""), waiting.get("message", "")))
    return waiting_reasons


def _why_it_waits(status: Mapping[str, Any]) -> str:
    for reason, message in _waiting(status):
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"{reason}: {message}"[:300]
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return f"{condition.get('reason', condition.get('type'))}: {condition['message']}"[:300]
    return "the kubelet has not started it yet"


def is_over(pod: Mapping[str, Any]) -> bool:
    """Tell whether Kubernetes counts nothing for it any more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_stuck(pod: Mapping[str, Any]) -> bool:
    """Tell whether none of its containers has run or is being made: they wait for an image, or for what they name."""
    status = pod.get("status") or {}
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    waiting = _waiting(status)
    being_made = any(reason in ("", "ContainerCreating", "PodInitializing") for reason, _ in waiting)
    return bool(waiting) and len(waiting) == len(containers) and not being_made


def belongs_to(pod: Mapping[str, Any], settings: ClusterSettings) -> bool:
    """Tell whether this scheduler has made the pod: its label, in a namespace that it looks after."""
    metadata = pod["metadata"]
    made_by = (metadata.get("labels") or {}).get(INSTANCE_LABEL)
    return made_by == label_value(settings.instance) and metadata.get("namespace") in settings.all_namespaces


def node_of(pod: Mapping[str, Any]) -> str:
    bound = (pod.get("spec") or {}).get("nodeName")
    named = (pod["metadata"].get("annotations") or {}).get(f"{GROUP}/node")
    return str(bound or named or "")


def _seconds(stamp: str | None, default: float) -> float:
    if stamp is None:
        return default
    # Python 3.10 does not know the Z.
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def created_at(pod: Mapping[str, Any]) -> float:
    return _seconds(pod["metadata"].get("creationTimestamp"), 0.0)
