"""Replicas as pods, on the slots that a cluster has free.

Nodes and pods are watched, never asked for one by one; what was just created or deleted is remembered until the watch
has told of it. Concurrency: the control loop's thread makes all calls, the watching threads only wake it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from trials.errors import ClusterRefused, ClusterUnreachable, LaunchFailed
from trials.kubernetes.client.api import PODS, QUOTAS, ClusterApi
from trials.kubernetes.names import PLACEHOLDER_LABEL, REPLICA_LABEL, Document, label_value
from trials.kubernetes.pods.manifest import (
    STATE_FOLDERS,
    Amounts,
    amount,
    beyond_slot,
    pod_manifest,
    slot_amounts,
    touches_ours,
)
from trials.kubernetes.pods.nodes import is_ready, node_slots
from trials.kubernetes.pods.status import PodEnd, belongs_to, created_at, is_over, is_stuck, node_of, read_end
from trials.kubernetes.settings import ClusterSettings, Owner
from trials.launch.base import Exit, Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.log_files import open_own
from trials.record import ReplicaRecord, SlotQuota

UNSEEN_SECONDS = 30.0
"""A pod that was created and of which the watch has not told by then does not exist."""
ORPHAN_SECONDS = 10.0
"""A pod that no replica's record names is deleted when it is so old: its scheduler died before it had noted it."""
LOG_BYTES = 256 * 1024
TOLD_SECONDS = 30.0
"""Seconds until the watches know it too, or the next pod is refused."""

logger = logging.getLogger(__name__)


class ClusterView(Protocol):
    def nodes(self) -> Sequence[Document]: ...

    def pods(self) -> Sequence[Document]: ...

    def quotas(self) -> Sequence[Document]: ...

    @property
    def version(self) -> int:
        """Return a number that changes with every change."""
        ...


class KubernetesLauncher(Launcher):
    """Launcher that runs each replica in a pod.

    ``owner_of``: the trial that a replica belongs to, from the store. ``log_of``: what a pod printed, its end.
    """

    def __init__(
        self,
        api: ClusterApi,
        view: ClusterView,
        settings: ClusterSettings,
        *,
        owner_of: Callable[[str], Owner],
        log_of: Callable[[str, str, int], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._view = view
        self._settings = settings
        self._owner_of = owner_of
        self._log_of = log_of
        self._clock = clock
        self._created: dict[str, tuple[float, Document]] = {}
        self._known: tuple[int, list[NodeSlots], dict[str, SlotQuota]] = (-1, [], {})
        self._told_quotas: dict[str, tuple[float, list[Document]]] = {}
        """Quotas of namespaces where a pod was refused, as the API server listed them then, with the time."""
        self._lock = threading.Lock()
        self._orphans_since: dict[str, float] = {}
        self._alive: set[str] | None = None
        """Labels of the replicas that have not ended; None before anybody has said."""
        self._dismissed: set[str] = set()
        """Pods whose replica was reported as gone."""

    def nodes(self) -> Sequence[NodeSlots]:
        """Return the nodes from what the watches know; computed anew when that has changed."""
        return self._look()[0]

    def quotas(self, trial_id: str) -> Sequence[SlotQuota]:
        of_namespace = self._look()[1]
        if not of_namespace:
            return ()
        found = of_namespace.get(self._owner_of(trial_id).namespace)
        return () if found is None else (found,)

    def _look(self) -> tuple[list[NodeSlots], dict[str, SlotQuota]]:
        with self._lock:
            version, nodes, quotas = self._known
            if version != self._view.version:
                version, pods = self._view.version, self._all_pods()
                nodes = node_slots(self._view.nodes(), pods, self._settings, self._alive)
                quotas = namespace_quotas(self._quotas(), pods, self._settings)
                self._known = version, nodes, quotas
            return nodes, quotas

    def _quotas(self) -> list[Document]:
        """Return the quotas that the watches know, or that were told since. The lock is held."""
        quotas_by_name = {_name(quota): quota for quota in self._view.quotas()}
        now = self._clock()
        for told_at, quotas in self._told_quotas.values():
            if now - told_at < TOLD_SECONDS:
                quotas_by_name |= {
                    _name(each): each for each in quotas if _is_newer(each, quotas_by_name.get(_name(each)))
                }
        return list(quotas_by_name.values())

    def _ask_for_quotas(self, namespace: str) -> None:
        """Ask for quotas after a pod was refused: the watches do not know, or not yet, why there is no room for it."""
        with contextlib.suppress(ClusterRefused, ClusterUnreachable):
            quotas = self._api.list(QUOTAS, namespace).get("items") or []
            with self._lock:
                self._told_quotas[namespace] = self._clock(), quotas
                self._known = (-1, [], {})

    def slot_environ(self, node: str, slot: int) -> Mapping[str, str]:
        threads = self._settings.slot.get("cpu")
        whole = int(float(threads)) if threads is not None and not threads.endswith("m") else 1
        return {"OMP_NUM_THREADS": str(max(1, whole))}

    def launch(self, request: LaunchRequest) -> ReplicaProcess:
        owner = self._owner_of(request.trial_id)
        too_large = beyond_slot(owner.templates, self._settings)
        if too_large is not None:
            raise LaunchFailed(f"{too_large}; lower it, or raise slot in the cluster's settings")
        touched = touches_ours(owner.templates)
        if touched is not None:
            raise LaunchFailed(touched)
        if self._settings.volume:
            for name in STATE_FOLDERS:
                self._make_folder(Path(request.environ[name]))
        manifest = pod_manifest(request, owner, self._settings)
        if not manifest["spec"]["containers"][0].get("image"):
            raise LaunchFailed(
                f"no image is known for trial {request.trial_id}; set spec.image of the trial or of its study, "
                "ELASTUNE_IMAGE for a sweep, or the chart's replicas.image"
            )
        try:
            pod = self._create(owner, manifest)
        except (ClusterRefused, ClusterUnreachable) as error:
            if isinstance(error, ClusterRefused) and error.status == 403:
                self._ask_for_quotas(owner.namespace)
            # The same words for every attempt: a pod's name is new each time.
            words = str(error).replace(request.replica_id, "NAME")
            raise LaunchFailed(f"the cluster refuses a pod on {request.node}: {words}") from error
        with self._lock:
            self._created[request.replica_id] = time.monotonic(), pod
            if self._alive is not None:
                self._alive.add(label_value(request.replica_id))
        # In its pod a replica is process 1; the pod's age makes the name unique.
        return ReplicaProcess(1, created_at(pod))

    @staticmethod
    def _make_folder(folder: Path) -> None:
        """Make a folder on the shared volume for pods that mount it alone: the kubelet would make it root's."""
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return
        except OSError as error:
            raise LaunchFailed(f"the trial's folders for checkpoints and data cannot be created: {error}") from error
        # Replicas may run as another user of the volume's group; some volumes have no such thing.
        with contextlib.suppress(OSError):
            folder.chmod(0o2770)

    def _create(self, owner: Owner, manifest: Document) -> Document:
        try:
            return self._api.create(PODS, owner.namespace, manifest)
        except ClusterRefused as error:
            # It is there already, or a quota is being counted anew.
            if error.status != 409:
                raise
            try:
                return self._api.get(PODS, owner.namespace, manifest["metadata"]["name"])
            except ClusterRefused:
                raise error from None

    def _all_pods(self) -> list[Document]:
        """Return the pods that the watch knows, and ours that it does not know yet. The lock is held."""
        seen = list(self._view.pods())
        if self._created:
            names = {pod["metadata"]["name"] for pod in seen}
            for name in [name for name in self._created if name in names]:
                self._created.pop(name, None)
            for name, (at, pod) in list(self._created.items()):
                if time.monotonic() - at >= UNSEEN_SECONDS:
                    self._look_up(name, pod)
            seen += [pod for _, pod in self._created.values()]
        return seen

    def _look_up(self, name: str, pod: Document) -> None:
        """Ask the API server for a pod: the watch is late."""
        try:
            found = self._api.get(PODS, pod["metadata"]["namespace"], name)
            self._created[name] = time.monotonic(), found
        except ClusterRefused as error:
            if error.status == 404:
                self._created.pop(name, None)
        except ClusterUnreachable as error:
            logger.warning("could not look up a pod pod=%s error=%s", name, error)

    def _our_pods(self) -> dict[str, Document]:
        return {
            pod["metadata"]["labels"][REPLICA_LABEL]: pod
            for pod in self._all_pods()
            if self._is_ours(pod) and REPLICA_LABEL in pod["metadata"]["labels"]
        }

    def _is_ours(self, pod: Mapping[str, Any]) -> bool:
        return belongs_to(pod, self._settings) and PLACEHOLDER_LABEL not in pod["metadata"]["labels"]

    def exits(self, replicas: Sequence[ReplicaRecord]) -> list[Exit]:
        with self._lock:
            pods = self._our_pods()
        ready = {node["metadata"]["name"] for node in self._view.nodes() if is_ready(node)}
        gone = []
        for replica in replicas:
            if replica.pid is None:
                continue
            pod = pods.get(label_value(replica.replica_id))
            end = self._end_of(pod, ready)
            if end is None:
                continue
            gone.append(Exit(replica.replica_id, end.status, end.why, end.code))
            self._dismissed.add(label_value(replica.replica_id))
        known = {label_value(replica.replica_id) for replica in replicas}
        self._note_alive(known - {label_value(each.replica_id) for each in gone})
        self._delete_orphans(pods, known)
        return gone

    def _note_alive(self, alive: set[str]) -> None:
        with self._lock:
            if alive != self._alive:
                self._alive = alive
                self._known = -1, [], {}

    def _end_of(self, pod: Document | None, ready: set[str]) -> PodEnd | None:
        if pod is None:
            return PodEnd(None)
        return read_end(
            pod,
            self._clock(),
            node_is_lost=node_of(pod) not in ready,
            deadline_seconds=self._settings.start_deadline_seconds,
        )

    def _delete_orphans(self, pods: Mapping[str, Document], wanted: set[str]) -> None:
        """Delete pods of replicas that have ended, once that has been noted, and pods that nobody knows."""
        now = time.monotonic()
        orphans = pods.keys() - wanted
        self._dismissed &= pods.keys()
        self._orphans_since = {name: self._orphans_since.get(name, now) for name in orphans}
        for name, since in self._orphans_since.items():
            if name in self._dismissed or now - since >= ORPHAN_SECONDS:
                self._delete(pods[name], grace_seconds=self._shortest_grace(pods[name]))

    def stop(self, replica: ReplicaRecord, *, force: bool) -> None:
        with self._lock:
            pod = self._our_pods().get(label_value(replica.replica_id))
        if pod is not None:
            self._delete(pod, grace_seconds=self._shortest_grace(pod) if force else None)

    def _shortest_grace(self, pod: Mapping[str, Any]) -> int:
        """Return the shortest grace: with 1 the pod goes when its container has, and its device is free.

        Of one that waits for its image there is nothing to end, which takes some kubelets most of a minute.
        """
        if is_stuck(pod):
            return 0
        name = node_of(pod)
        ready = any(node["metadata"]["name"] == name and is_ready(node) for node in self._view.nodes())
        return 1 if ready else 0

    def _delete(self, pod: Mapping[str, Any], *, grace_seconds: int | None) -> None:
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp") and grace_seconds != 0:
            asked = metadata.get("deletionGracePeriodSeconds")
            if grace_seconds is None or (asked is not None and asked <= grace_seconds):
                return
        try:
            self._api.delete(PODS, metadata["namespace"], metadata["name"], grace_seconds=grace_seconds)
        except (ClusterRefused, ClusterUnreachable) as error:
            # Asked again at the next look.
            logger.warning("could not delete a pod, will try again pod=%s error=%s", metadata["name"], error)
        with self._lock:
            self._created.pop(metadata["name"], None)

    def collect_log(self, replica: ReplicaRecord, file: Path) -> None:
        """Write the end of what the replica's pod has printed into ``file``; nothing when it cannot be read."""
        if self._log_of is None:
            return
        with self._lock:
            pod = self._our_pods().get(label_value(replica.replica_id))
        if pod is None:
            return
        try:
            words = self._log_of(pod["metadata"]["namespace"], pod["metadata"]["name"], LOG_BYTES)
            file.parent.mkdir(parents=True, exist_ok=True)
            with open_own(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as written:
                written.write(words.encode(errors="replace"))
        except (ClusterRefused, ClusterUnreachable, OSError) as error:
            logger.info("could not read a log replica=%s error=%s", replica.replica_id, error)


def _name(document: Document) -> tuple[str, str]:
    return document["metadata"]["namespace"], document["metadata"]["name"]


def _is_newer(document: Document, other: Document | None) -> bool:
    """Compare by the API server's count, where both have one; otherwise take what was asked for last."""
    if other is None:
        return True
    versions = [str(each["metadata"].get("resourceVersion", "")) for each in (document, other)]
    return int(versions[0]) > int(versions[1]) if all(each.isdecimal() for each in versions) else True


PLAIN = frozenset({"cpu", "memory", "ephemeral-storage"})
"""A quota may name their requests without saying that it means those."""


def namespace_quotas(
    quotas: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], settings: ClusterSettings
) -> dict[str, SlotQuota]:
    """Return quotas by namespace; those without a quota that concerns replicas have no entry.

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
            f"the resource quota {name!r} of namespace {namespace} is used up",
        )
        for namespace, (left, name) in room.items()
    }


def _room(quota: Mapping[str, Any], slot: Amounts) -> int | None:
    spec, status = quota.get("spec") or {}, quota.get("status") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return None
    used = status.get("used") or {}
    rooms = [
        max(0, int((amount(hard) - amount(used.get(key, "0"))) // wanted))
        for key, hard in (status.get("hard") or spec.get("hard") or {}).items()
        if (wanted := _wanted(key, slot)) is not None
    ]
    return min(rooms, default=None)


def _wanted(key: str, slot: Amounts) -> Decimal | None:
    """Return the amount of a quota's resource ``key`` that one replica takes; None if it takes none."""
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
