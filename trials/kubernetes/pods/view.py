"""View of the cluster from watches: nodes, everybody's pods, and the quotas of our namespaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trials.kubernetes.client.api import NODES, PODS, QUOTAS, KubernetesApi
from trials.kubernetes.client.watching import Watched
from trials.kubernetes.names import Document

_CONTAINER_FIELDS = frozenset({"name", "resources", "restartPolicy"})
_POD_FIELDS = frozenset(
    {"nodeName", "containers", "initContainers", "overhead", "resources", "terminationGracePeriodSeconds"}
)
_NODE_STATUS_FIELDS = frozenset({"allocatable", "conditions"})


class WatchedCluster:
    def __init__(self, api: KubernetesApi, namespaces: Sequence[str]) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called, from a watching thread, with every change that may matter."""
        self.version = 0
        self._nodes = Watched(api, NODES, trim=_trim_node, heard=self._note, gone=self._note)
        self._pods = Watched(api, PODS, trim=_trim_pod, heard=self._note, gone=self._note)
        self._quotas = [
            Watched(api, QUOTAS, namespace=namespace, heard=self._note, gone=self._note) for namespace in namespaces
        ]

    def start(self, seconds: float = 60.0) -> None:
        """Start to follow pods and nodes; raise ClusterUnreachable when the first lists do not come."""
        everything = (self._nodes, self._pods, *self._quotas)
        for watched in everything:
            watched.start()
        for watched in everything:
            watched.wait_until_synced(seconds)

    def nodes(self) -> Sequence[Document]:
        return self._nodes.objects()

    def pods(self) -> Sequence[Document]:
        return self._pods.objects()

    def quotas(self) -> Sequence[Document]:
        return [document for watched in self._quotas for document in watched.objects()]

    def _note(self, document: Document) -> None:
        self.version += 1
        self.on_change()


def _trim_pod(pod: Document) -> None:
    """Drop what nobody here reads, which is most of it."""
    spec = pod.get("spec") or {}
    for name in spec.keys() - _POD_FIELDS:
        del spec[name]
    for key in ("containers", "initContainers"):
        spec[key] = [
            {name: value for name, value in container.items() if name in _CONTAINER_FIELDS}
            for container in spec.get(key) or ()
        ]


def _trim_node(node: Document) -> None:
    status = node.get("status") or {}
    for name in status.keys() - _NODE_STATUS_FIELDS:
        del status[name]
