"""A replica's pod: what is asked of the API server, and what is read from what it says. Pure functions.

A pod is made for one node, by node affinity: Kubernetes's own scheduler still binds it, so that priorities, volumes,
taints and other people's pods count as everywhere. It is never restarted by the kubelet: whether and where a replica
starts again is the policy's decision.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dist_core.link.environment import GRACE_SECONDS, TOKEN, TOKEN_FILE
from trials.kubernetes.amounts import Amounts, requests_of
from trials.kubernetes.names import (
    GROUP,
    INSTANCE_LABEL,
    NODE_LABEL,
    REPLICA_LABEL,
    SLOT_LABEL,
    STUDY_LABEL,
    TRIAL_LABEL,
    VERSION,
    Document,
    label_value,
)
from trials.kubernetes.owner import Owner
from trials.kubernetes.settings import ClusterSettings
from trials.launch.base import NO_ROOM, LaunchRequest

CONTAINER = "replica"
OWN_VOLUMES = "elastune-"
"""How the names of volumes begin that are not for templates: the one with everybody's checkpoints is among them."""
TOKEN_FOLDER = "/var/run/secrets/elastune"  # noqa: S105  # where it is, not what it is
TOKEN_SECONDS = 3600
"""For so long the kubelet's token of a replica is good; it is replaced in time, and ends with the pod."""
NODE_TOLERATION_SECONDS = 5
"""How long a pod stays on a node that is not ready; the trial itself heals sooner."""
HOPELESS = frozenset(
    {"ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
"""Reasons of a waiting container that no patience cures."""
PATIENCE = 10.0
"""So many times the deadline is allowed for what is only slow: an image that is being pulled, a queue."""


def pod_manifest(request: LaunchRequest, owner: Owner, settings: ClusterSettings) -> Document:
    """``request``: as for any launcher; of its environment only the suite's own variables are set in the pod."""
    template: Document = {}
    for each in (settings.template, *owner.templates):
        template = merge_templates(template, each)
    metadata = template.setdefault("metadata", {})
    spec = template.setdefault("spec", {})
    container = _main_container(spec)
    image = request.image or container.get("image") or owner.image or settings.image
    container["image"] = image
    container["command"] = ["python", "-u", "-m", "trials.inside.pod_start"]
    container.pop("args", None)
    grace = spec.setdefault("terminationGracePeriodSeconds", int(GRACE_SECONDS))
    container["env"] = _environ(request, container.get("env") or [], image, grace)
    _give_slot(container, settings)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _add_volumes(spec, container, request, settings)
    labels = {
        **(metadata.get("labels") or {}),
        "app.kubernetes.io/name": "elastune-replica",
        "app.kubernetes.io/managed-by": "elastune",
        INSTANCE_LABEL: label_value(settings.instance),
        TRIAL_LABEL: label_value(owner.trial_id),
        STUDY_LABEL: label_value(owner.study),
        REPLICA_LABEL: label_value(request.replica_id),
        SLOT_LABEL: str(request.slot),
        NODE_LABEL: label_value(request.node),
    }
    if owner.queue:
        labels["kueue.x-k8s.io/queue-name"] = owner.queue
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)
    spec["restartPolicy"] = "Never"
    spec["affinity"] = _pinned(spec.get("affinity") or {}, request.node)
    spec["tolerations"] = [*(spec.get("tolerations") or []), *_tolerations()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": request.replica_id,
            "namespace": owner.namespace,
            "labels": labels,
            "annotations": {
                "cluster-autoscaler.kubernetes.io/safe-to-evict": str(owner.preemptible).lower(),
                **({} if owner.preemptible else {"karpenter.sh/do-not-disrupt": "true"}),
                **(metadata.get("annotations") or {}),
                f"{GROUP}/node": request.node,
            },
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "Trial",
                    "name": owner.name,
                    "uid": owner.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": spec,
    }


def _main_container(spec: Document) -> Document:
    containers = spec.setdefault("containers", [])
    for container in containers:
        if container.get("name") == CONTAINER:
            main: Document = container
            return main
    containers.insert(0, {"name": CONTAINER})
    made: Document = containers[0]
    return made


def _environ(request: LaunchRequest, given: Sequence[Mapping[str, Any]], image: str, grace: int) -> list[Document]:
    """The pod's variables: the template's, then the trial's and the suite's own."""
    start = {
        "entrypoint": request.entrypoint,
        "working_dir": request.working_dir,
        "python_path": list(request.python_path),
        "package": request.package,
        "moved_to": request.moved_to,
        "image": image,
    }
    own = {**request.environ, "ELASTUNE_START": json.dumps(start), "ELASTUNE_GRACE_SECONDS": str(grace)}
    # Whoever may look at pods sees this; the kubelet gives the pod a token that stands nowhere else.
    own.pop(TOKEN, None)
    own[TOKEN_FILE] = f"{TOKEN_FOLDER}/token"
    named = [dict(each) for each in given if each.get("name") not in own]
    address = {"name": "ELASTUNE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    own.pop("ELASTUNE_HOST", None)
    return [*named, *({"name": name, "value": value} for name, value in sorted(own.items())), address]


def _give_slot(container: Document, settings: ClusterSettings) -> None:
    resources = container.setdefault("resources", {})
    asked, most = resources.get("requests") or {}, resources.get("limits") or {}
    # As Kubernetes itself takes it: who names a limit alone requests that much.
    resources["requests"] = {**settings.slot, **most, **asked}
    resources["limits"] = {**_limits({**settings.slot, **asked}), **most}


def slot_amounts(settings: ClusterSettings) -> Amounts:
    """What one replica requests whose trial and study add nothing: that is a slot."""
    return _demand((settings.template,), settings)


def touches_ours(templates: Sequence[Mapping[str, Any]]) -> str | None:
    """Why replicas with these templates would see what is not their trial's: they name volumes that are ours."""
    for template in templates:
        spec = template.get("spec") or {}
        containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
        mounts = [
            mount
            for each in containers
            for mount in (*(each.get("volumeMounts") or ()), *(each.get("volumeDevices") or ()))
        ]
        for named in (*(spec.get("volumes") or ()), *mounts):
            if str(named.get("name", "")).startswith(OWN_VOLUMES):
                return (
                    f"its pod template names the volume {named['name']!r}; names that begin with {OWN_VOLUMES!r} are "
                    "the suite's own, choose another one"
                )
    return None


def beyond_slot(templates: Sequence[Mapping[str, Any]], settings: ClusterSettings) -> str | None:
    """Why replicas with these templates do not fit into a slot: their trial could not be given the room it needs."""
    slot = slot_amounts(settings)
    for name, asked in sorted(_demand((settings.template, *templates), settings).items()):
        if name in slot and asked > slot[name]:
            return f"its pod template makes a replica request {asked:f} of {name}, but a slot is {slot[name]:f}"
    return None


def _demand(templates: Sequence[Mapping[str, Any]], settings: ClusterSettings) -> Amounts:
    whole: Document = {}
    for each in templates:
        whole = merge_templates(whole, each)
    spec = whole.setdefault("spec", {})
    _give_slot(_main_container(spec), settings)
    return {name: asked for name, asked in requests_of({"spec": spec}).items() if asked > 0}


def _limits(slot: Mapping[str, str]) -> dict[str, str]:
    """Cores are shared by what is requested; memory and devices are what a slot has."""
    return {name: amount for name, amount in slot.items() if name != "cpu"}


def _add_volumes(spec: Document, container: Document, request: LaunchRequest, settings: ClusterSettings) -> None:
    volumes = spec.setdefault("volumes", [])
    mounts = container.setdefault("volumeMounts", [])
    folder = request.environ["ELASTUNE_CHECKPOINT_DIR"]
    mount = {"name": "elastune-state", "mountPath": folder}
    if settings.volume:
        # Other trials' checkpoints, packed code and logs are on the same volume.
        mount["subPath"] = os.path.relpath(folder, settings.state_dir)
    token = {"audience": settings.audience, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    volumes.append({"name": "elastune-token", "projected": {"sources": [{"serviceAccountToken": token}]}})
    mounts.append({"name": "elastune-token", "mountPath": TOKEN_FOLDER, "readOnly": True})
    volumes.append({"name": "elastune-state", **(dict(settings.volume) or {"emptyDir": {}})})
    mounts.append(mount)
    if "/dev/shm" not in {mount.get("mountPath") for mount in mounts}:  # noqa: S108  # a device, not a file
        # PyTorch's data loaders pass batches through shared memory, of which a container has 64 MiB by itself.
        volumes.append({"name": "elastune-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "elastune-memory", "mountPath": "/dev/shm"})  # noqa: S108  # a device, not a file
    if request.package:
        volumes.append({"name": "elastune-code", "emptyDir": {}})
        mounts.append({"name": "elastune-code", "mountPath": request.working_dir})


def _pinned(affinity: Mapping[str, Any], node: str) -> Document:
    """To that node, beside whatever else the template asks for."""
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    pinned = copy.deepcopy(dict(affinity))
    required = pinned.setdefault("nodeAffinity", {}).setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [{**term, "matchFields": [*(term.get("matchFields") or []), pin]} for term in terms]
    return pinned


def _tolerations() -> list[Document]:
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_TOLERATION_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]


def merge_templates(below: Mapping[str, Any], above: Mapping[str, Any]) -> Document:
    """``above`` added to ``below``: objects by field, lists of named things by name, other lists joined."""
    merged: Document = copy.deepcopy(dict(below))
    for key, value in above.items():
        present = merged.get(key)
        if isinstance(value, Mapping) and isinstance(present, Mapping):
            merged[key] = merge_templates(present, value)
        elif isinstance(value, list) and isinstance(present, list):
            merged[key] = _merge_lists(present, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _merge_lists(below: list[Any], above: list[Any]) -> list[Any]:
    together = (*below, *above)
    # A volume may be mounted at several places.
    key = next(
        (key for key in ("mountPath", "name") if all(isinstance(e, Mapping) and key in e for e in together)), None
    )
    if key is None:
        return [*copy.deepcopy(below), *(copy.deepcopy(each) for each in above if each not in below)]
    merged = {each[key]: copy.deepcopy(each) for each in below}
    for each in above:
        present = merged.get(each[key])
        merged[each[key]] = copy.deepcopy(each) if present is None else merge_templates(present, each)
    return list(merged.values())


# ---------------------------------------------------------------------- what the API server says


@dataclass(frozen=True, slots=True)
class PodEnd:
    """A replica that does not run any more, or never will."""

    status: int | None
    why: str = ""
    code: str = "pod_ended"


def read_end(pod: Mapping[str, Any], now: float, *, node_is_lost: bool, deadline_seconds: float) -> PodEnd | None:
    """None while the replica runs, or may still start."""
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if is_over(pod) or _main_has_ended(status):
        return _ended(pod)
    node = node_of(pod)
    if node_is_lost and phase == "Running":
        return PodEnd(None, f"node {node} does not answer any more", "node_lost")
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
    """Also while other containers of the pod, such as a mesh's, still run."""
    return any(
        container.get("name") == CONTAINER and (container.get("state") or {}).get("terminated")
        for container in status.get("containerStatuses") or ()
    )


def _is_held_or_pulls(status: Mapping[str, Any]) -> bool:
    """A queue has not let it in yet, or its image is on the way."""
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
            return PodEnd(-9, "the memory of its pod was used up", "out_of_memory")
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
    found = []
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            found.append((waiting.get("reason", ""), waiting.get("message", "")))
    return found


def _why_it_waits(status: Mapping[str, Any]) -> str:
    for reason, message in _waiting(status):
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"{reason}: {message}"[:300]
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return f"{condition.get('reason', condition.get('type'))}: {condition['message']}"[:300]
    return "the kubelet has not started it yet"


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether Kubernetes counts nothing for it any more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_stuck(pod: Mapping[str, Any]) -> bool:
    """Whether none of its containers has run or is being made: they wait for an image, or for what they name."""
    status = pod.get("status") or {}
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    waiting = _waiting(status)
    being_made = any(reason in ("", "ContainerCreating", "PodInitializing") for reason, _ in waiting)
    return bool(waiting) and len(waiting) == len(containers) and not being_made


def belongs_to(pod: Mapping[str, Any], settings: ClusterSettings) -> bool:
    """Whether this scheduler has made the pod: its label, in a namespace that it looks after."""
    metadata = pod["metadata"]
    made_by = (metadata.get("labels") or {}).get(INSTANCE_LABEL)
    return made_by == label_value(settings.instance) and metadata.get("namespace") in settings.all_namespaces


def node_of(pod: Mapping[str, Any]) -> str:
    """Where it runs, or is meant to."""
    bound = (pod.get("spec") or {}).get("nodeName")
    named = (pod["metadata"].get("annotations") or {}).get(f"{GROUP}/node")
    return str(bound or named or "")


def _seconds(stamp: str | None, default: float) -> float:
    if stamp is None:
        return default
    return datetime.fromisoformat(stamp).timestamp()


def created_at(pod: Mapping[str, Any]) -> float:
    return _seconds(pod["metadata"].get("creationTimestamp"), 0.0)
