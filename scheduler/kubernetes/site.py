"""A cluster's nodes as the place of a scheduler's slots: pods, and trials and studies that people apply."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler.api.site import Site
from scheduler.kubernetes.pod_tokens import PodTokens
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import NodeView
from trials.errors import UnknownTrial
from trials.kubernetes.client.api import NODES, PODS, QUOTAS, STUDIES, TRIALS, KubernetesApi
from trials.kubernetes.client.watching import Watched
from trials.kubernetes.names import Document
from trials.kubernetes.pods.launcher import KubernetesLauncher
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.settings import ClusterSettings
from trials.store import TrialStore

OWN_VARIABLES = frozenset({"TZ", "LANG", "LC_ALL"})
"""Variables that replicas inherit; the rest of a replica's environment is its image's."""
SYNC_SECONDS = 60.0
"""Longest wait for the first lists of the watches."""


class ClusterSite(Site):
    grows = True
    runs_elsewhere = True

    def __init__(self, api: KubernetesApi, settings: ClusterSettings, store: KubernetesTrialStore) -> None:
        self._api = api
        self._settings = settings
        self._store = store
        self.view = WatchedCluster(api, settings.all_namespaces)
        super().__init__(KubernetesLauncher(api, self.view, settings, owner_of=store.owner_of, log_of=self._log_of))
        self.namespaces = settings.namespaces
        self.others_tokens = PodTokens(api, settings.audience, self._namespace_of)

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        return {name: os.environ[name] for name in OWN_VARIABLES & os.environ.keys()}

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(
            NodeView(name=node.node, slots=node.slots - len(node.in_use), kind=node.kind)
            for node in self.launcher.nodes()
        )

    def call_on_change(self, wake: Callable[[], None]) -> None:
        self.view.on_change = wake

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        """Start to follow the cluster; raise ClusterUnreachable when the first lists do not come."""
        self.view.start(SYNC_SECONDS)
        following = self._store.following

        def heard(take: Callable[[Mapping[str, Any]], bool]) -> Callable[[dict[str, Any]], None]:
            def handle(document: dict[str, Any]) -> None:
                if take(document):
                    loop.decisions.decide_anew()
                    loop.wake()
                # The store has what it says; kept twice it would be most of the memory.
                document.pop("status", None)

            return handle

        def gone(forget: Callable[[Mapping[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
            def handle(document: dict[str, Any]) -> None:
                forget(document)
                loop.wake()

            return handle

        kinds = (
            (STUDIES, heard(following.take_study), gone(following.forget_study)),
            (TRIALS, heard(following.take_trial), gone(following.forget_trial)),
        )
        watches = [
            Watched(self._api, kind, namespace=namespace, heard=take, gone=forget)
            for namespace in self._settings.all_namespaces
            for kind, take, forget in kinds
        ]
        for watched in watches:
            watched.start()
        for watched in watches:
            watched.wait_until_synced(SYNC_SECONDS)

    def _log_of(self, namespace: str, pod: str, most_bytes: int) -> str:
        return self._api.log(namespace, pod, most_bytes=most_bytes)

    def _namespace_of(self, replica_id: str) -> str | None:
        """Return where the pod of a replica is; None where there is no such trial."""
        try:
            trial = self._store.trial(replica_id.rpartition("-")[0])
        except UnknownTrial:
            return None
        return self._settings.place_of(trial.spec.study)[0]


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
