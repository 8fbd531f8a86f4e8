"""A replica's pod: what is asked of the API server. Pure functions.

A pod is made for one node, by node affinity: Kubernetes's own scheduler still binds it, so that priorities, volumes,
taints and other people's pods count as everywhere. It is never restarted by the kubelet: whether and where a replica
starts again is the policy's decision.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from kubernetes.utils import parse_quantity

from dist_core.link.environment import GRACE_SECONDS, SLOT_MEMORY, TOKEN, TOKEN_FILE
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
from trials.kubernetes.settings import ClusterSettings, Owner
from trials.launch.base import LaunchRequest

CONTAINER = "replica"
STATE_FOLDERS = ("ELASTUNE_CHECKPOINT_DIR", "ELASTUNE_PREPARED_DIR")
"""Variables of folders on the state's volume: a trial's checkpoints, and what its study prepares once."""
OWN_VOLUMES = "elastune-"
"""Prefix of volumes that are not for templates: the one with everybody's checkpoints is among them."""
TOKEN_FOLDER = "/var/run/secrets/elastune"  # noqa: S105  # where it is, not what it is
TOKEN_SECONDS = 3600
"""Seconds that the kubelet's token of a replica is good; it is replaced in time, and ends with the pod."""
NODE_TOLERATION_SECONDS = 5
"""Seconds that a pod stays on a node that is not ready; the trial itself heals sooner."""


def pod_manifest(request: LaunchRequest, owner: Owner, settings: ClusterSettings) -> Document:
    """Return the pod for a request; of its environment only Elastune's own variables are set."""
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
    _tell_memory(container)
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


def _environ(request: LaunchRequest, variables: Sequence[Mapping[str, Any]], image: str, grace: int) -> list[Document]:
    """Return the pod's variables: the template's, then the trial's and the suite's own."""
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
    named = [dict(each) for each in variables if each.get("name") not in own]
    address = {"name": "ELASTUNE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    own.pop("ELASTUNE_HOST", None)
    return [*named, *({"name": name, "value": value} for name, value in sorted(own.items())), address]


def _give_slot(container: Document, settings: ClusterSettings) -> None:
    resources = container.setdefault("resources", {})
    asked, most = resources.get("requests") or {}, resources.get("limits") or {}
    # As Kubernetes itself takes it: who names a limit alone requests that much.
    resources["requests"] = {**settings.slot, **most, **asked}
    resources["limits"] = {**_limits({**settings.slot, **asked}), **most}


def _tell_memory(container: Document) -> None:
    """Set the memory that the pod may use, which a template can have made less than a slot, or more."""
    limit = container["resources"]["limits"].get("memory")
    if limit is not None and not any(each.get("name") == SLOT_MEMORY for each in container["env"]):
        container["env"].append({"name": SLOT_MEMORY, "value": str(int(amount(limit)))})


def slot_amounts(settings: ClusterSettings) -> Amounts:
    """Return the request of a replica whose trial and study add nothing: that is a slot."""
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
                    "reserved, choose another one"
                )
    return None


def beyond_slot(templates: Sequence[Mapping[str, Any]], settings: ClusterSettings) -> str | None:
    """Why replicas with these templates do not fit into a slot: their trial could not be given the room it needs."""
    slot = slot_amounts(settings)
    for name, asked in sorted(_demand((settings.template, *templates), settings).items()):
        if name in slot and asked > slot[name]:
            return f"its pod template requests {asked:f} of {name} for a replica, but a slot has {slot[name]:f}"
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
    folder, prepared = (request.environ[name] for name in STATE_FOLDERS)
    mount = {"name": "elastune-state", "mountPath": folder}
    shared = {"name": "elastune-state", "mountPath": prepared, "subPath": "prepared"}
    if settings.volume:
        # Other trials' checkpoints, other studies' data, packed code and logs are on the same volume.
        mount["subPath"], shared["subPath"] = (os.path.relpath(each, settings.state_dir) for each in (folder, prepared))
    token = {"audience": settings.audience, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    volumes.append({"name": "elastune-token", "projected": {"sources": [{"serviceAccountToken": token}]}})
    mounts.append({"name": "elastune-token", "mountPath": TOKEN_FOLDER, "readOnly": True})
    volumes.append({"name": "elastune-state", **(dict(settings.volume) or {"emptyDir": {}})})
    mounts += [mount, shared]
    if "/dev/shm" not in {mount.get("mountPath") for mount in mounts}:  # noqa: S108  # a device, not a file
        # PyTorch's data loaders pass batches through shared memory, of which a container has 64 MiB by itself.
        volumes.append({"name": "elastune-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "elastune-memory", "mountPath": "/dev/shm"})  # noqa: S108  # a device, not a file
    if request.package:
        volumes.append({"name": "elastune-code", "emptyDir": {}})
        mounts.append({"name": "elastune-code", "mountPath": request.working_dir})


def _pinned(affinity: Mapping[str, Any], node: str) -> Document:
    """Pin to that node, beside whatever else the template asks for."""
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
    """Add ``above`` to ``below``: objects by field, lists of named things by name, other lists joined."""
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


Amounts = dict[str, Decimal]
"""Amounts by name of a resource, such as cpu or nvidia.com/gpu."""


@lru_cache(maxsize=4096)
def amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))


def requests_of(pod: Mapping[str, Any]) -> Amounts:
    """Return what Kubernetes reserves for a pod: its containers' sum, or what one of its first containers needs alone.

    Newer versions have containers that start first and stay, and amounts for a pod as a whole.
    """
    spec = pod.get("spec") or {}
    total: Amounts = {}
    for container in spec.get("containers") or ():
        for key, value in _requests(container).items():
            total[key] = total.get(key, Decimal(0)) + value
    first: Amounts = {}
    for container in spec.get("initContainers") or ():
        stays = container.get("restartPolicy") == "Always"
        for key, value in _requests(container).items():
            if stays:
                total[key] = total.get(key, Decimal(0)) + value
            else:
                first[key] = max(first.get(key, Decimal(0)), value)
    total |= {key: max(total.get(key, Decimal(0)), value) for key, value in first.items()}
    total |= _requests(spec)
    for key, value in (spec.get("overhead") or {}).items():
        total[key] = total.get(key, Decimal(0)) + amount(value)
    return total


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    named = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: amount(value) for key, value in named.items()}
