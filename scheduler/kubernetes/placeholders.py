"""Asking for nodes: pods that wait for room, which an autoscaler of nodes (Cluster Autoscaler, Karpenter) then makes.

How many nodes there should be is `scheduler.allocation.autoscale`'s answer. One placeholder stands for the slots of one
node that is wanted and not there, and fits on none of those that are. When that node has come, or is not wanted any
more, its placeholder goes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes.utils import parse_quantity

from scheduler.allocation.autoscale import Autoscaler, AutoscaleSettings
from scheduler.snapshot import Snapshot
from trials.errors import InvalidClusterSettings
from trials.kubernetes.client.api import PODS, ClusterApi
from trials.kubernetes.names import INSTANCE_LABEL, PLACEHOLDER_LABEL, Document, camel, label_value, snake
from trials.kubernetes.pods.manifest import merge_templates
from trials.kubernetes.pods.status import belongs_to
from trials.kubernetes.settings import ClusterSettings

KNOWN = {"most_nodes", "least_nodes", "slots_per_node", "price_per_hour", "worth_of_an_hour", "image", "template"}
HOST_LABEL = "kubernetes.io/hostname"
UNSEEN_SECONDS = 30.0
logger = logging.getLogger(__name__)


class Placeholders:
    """Keeps as many pods waiting as there are nodes to ask for.

    ``pods``, ``nodes``: those that the watches know.
    """

    def __init__(
        self,
        api: ClusterApi,
        settings: ClusterSettings,
        pods: Callable[[], Sequence[Document]],
        nodes: Callable[[], Sequence[Document]],
    ) -> None:
        self._api = api
        self._settings = settings
        self._pods = pods
        self._nodes = nodes
        self._created: dict[str, float] = {}
        self._autoscaler = autoscaler_from(settings)

    def adjust(self, snapshot: Snapshot | None, now: float) -> None:
        if self._autoscaler is None or snapshot is None:
            return
        present = len(snapshot.nodes)
        desired = self._autoscaler.decide(snapshot, present, now)
        waiting = {pod["metadata"]["name"] for pod in self._pods() if self._is_one(pod)}
        # The watch may not have told yet of those that were just made.
        self._created = {
            name: at for name, at in self._created.items() if name not in waiting and now - at < UNSEEN_SECONDS
        }
        more, fewer = difference(desired - present, sorted(waiting | self._created.keys()))
        hosts = [(node["metadata"].get("labels") or {}).get(HOST_LABEL, "") for node in self._nodes()]
        for _ in range(more):
            made = placeholder(self._settings, secrets.token_hex(4), [host for host in hosts if host])
            self._api.create(PODS, self._settings.namespace, made)
            self._created[made["metadata"]["name"]] = now
        for name in fewer:
            self._api.delete(PODS, self._settings.namespace, name, grace_seconds=0)
            self._created.pop(name, None)
        if more or fewer:
            logger.info("nodes wanted=%d present=%d placeholders=%+d", desired, present, more - len(fewer))

    def _is_one(self, pod: Mapping[str, Any]) -> bool:
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp") or not belongs_to(pod, self._settings):
            return False
        return PLACEHOLDER_LABEL in metadata["labels"]


def difference(wanted: int, present: Sequence[str]) -> tuple[int, list[str]]:
    """Return how many placeholders to make, and which to take away."""
    return max(0, wanted - len(present)), sorted(present)[max(0, wanted) :]


def autoscaler_from(settings: ClusterSettings) -> Autoscaler | None:
    """Return the cluster's autoscaler, None if its nodes do not change; raise InvalidClusterSettings."""
    options = dict(settings.placeholders)
    if not options:
        return None
    unknown = {snake(key) for key in options} - KNOWN
    if unknown:
        known = ", ".join(sorted(map(camel, KNOWN)))
        raise InvalidClusterSettings(f"placeholders.{camel(min(unknown))} is not a setting; there are {known}")
    named = {snake(key): value for key, value in options.items()}
    numbers = {
        name: _number(name, named.get(name, default))
        for name, default in (
            ("slots_per_node", 1),
            ("price_per_hour", 1.0),
            ("least_nodes", 0),
            ("most_nodes", 16),
            ("worth_of_an_hour", 10.0),
        )
    }
    return Autoscaler(
        AutoscaleSettings(
            slots=max(1, int(numbers["slots_per_node"])),
            price_per_hour=numbers["price_per_hour"],
            least_nodes=int(numbers["least_nodes"]),
            most_nodes=int(numbers["most_nodes"]),
            worth_of_an_hour=numbers["worth_of_an_hour"],
        )
    )


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or value < 0:
        raise InvalidClusterSettings(
            f"placeholders.{camel(name)} is {value!r}; it must be a number that is not below 0"
        )
    return float(value)


def placeholder(settings: ClusterSettings, suffix: str, hosts: Sequence[str]) -> Document:
    """Return a pod as large as all slots of a node, that may run on none of the nodes that are there already."""
    options = {snake(key): value for key, value in settings.placeholders.items()}
    slots = int(options.get("slots_per_node", 1))
    amounts = {name: f"{(parse_quantity(quantity) * slots).normalize():f}" for name, quantity in settings.slot.items()}
    own: Document = {
        "spec": {
            "containers": [
                {
                    "name": "placeholder",
                    "image": options.get("image") or settings.image,
                    "command": ["python", "-c", "import signal; signal.pause()"],
                    "resources": {"requests": amounts, "limits": {k: v for k, v in amounts.items() if k != "cpu"}},
                }
            ],
            "restartPolicy": "Never",
            "affinity": _elsewhere(hosts),
            "terminationGracePeriodSeconds": 0,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
        }
    }
    template = merge_templates(own, options.get("template") or {})
    labels = {INSTANCE_LABEL: label_value(settings.instance), PLACEHOLDER_LABEL: "true"}
    metadata = template.pop("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "name": f"{settings.instance}-placeholder-{suffix}",
            "namespace": settings.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
        },
        **template,
    }


def _elsewhere(hosts: Sequence[str]) -> Document:
    if not hosts:
        return {}
    rule = {"key": HOST_LABEL, "operator": "NotIn", "values": sorted(hosts)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
