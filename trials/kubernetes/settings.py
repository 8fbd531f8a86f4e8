"""Settings by a cluster's administrator: a YAML file that the chart writes, checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from kubernetes.utils import parse_quantity

from trials.errors import InvalidClusterSettings
from trials.kubernetes.names import camel, qualified

DEFAULT_SLOT = {"nvidia.com/gpu": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of a cluster's administrator.

    Raises InvalidClusterSettings for values that mean nothing.
    """

    namespace: str = "default"
    """Namespace of the scheduler, and of what front ends submit without naming one."""
    namespaces: tuple[str, ...] = ()
    """Further namespaces in which it looks after trials."""
    instance: str = "elastune"
    """Name of this scheduler, by which its pods are told from those of others in the cluster."""
    slot: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_SLOT))
    """Request and limit of one replica, in Kubernetes's resources."""
    image: str = ""
    """Image of replicas whose trial and study name none."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Pod template that all replicas start from."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that may be used; empty: all."""
    kind_label: str = "nvidia.com/gpu.product"
    """Label that tells what kind of slots a node has, where they are not all alike."""
    reserved_label: str = "elastune.dev/reserved-for"
    """Label that names the studies, joined by dots, that alone may use a node."""
    most_slots: int | None = None
    """Used at once in all, whatever the cluster has."""
    start_deadline_seconds: float = 60.0
    """A pod that has not started by then is given up."""
    volume: Mapping[str, Any] = field(default_factory=dict)
    """Volume for checkpoints that all pods share, such as a persistentVolumeClaim; without one they go with the pod."""
    state_dir: str = "/var/lib/elastune"
    """Mount point of that volume, in the scheduler's pods as well as in replicas'."""
    placeholders: Mapping[str, Any] = field(default_factory=dict)
    """Node autoscaling: ``most_nodes``, ``slots_per_node``, ``price_per_hour``, ``template``; empty: none."""
    keep_ended_seconds: float = 7 * 24 * 3600.0
    """Trials that ended earlier are removed from the API server."""

    def __post_init__(self) -> None:
        if not self.slot:
            raise InvalidClusterSettings("slot is empty; name what a replica requests, such as nvidia.com/gpu: 1")
        for name, amount in self.slot.items():
            try:
                positive = parse_quantity(amount) > 0
            except (ValueError, TypeError):
                positive = False
            if not positive:
                raise InvalidClusterSettings(
                    f"slot.{name} is {amount!r}; it must be a Kubernetes quantity above 0, such as 500m or 2Gi"
                )
        if self.start_deadline_seconds <= 0:
            raise InvalidClusterSettings(f"startDeadlineSeconds is {self.start_deadline_seconds!r}; it must be above 0")

    @property
    def audience(self) -> str:
        """Whom replicas' tokens are for: this scheduler, and no other of the cluster."""
        return f"{self.instance}.{self.namespace}.elastune.dev"

    @property
    def all_namespaces(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.namespace, *self.namespaces)))

    def name_of(self, namespace: str, name: str) -> str:
        """Return the name of a trial or study within the scheduler."""
        return qualified(namespace, name, self.namespace)

    def place_of(self, study: str) -> tuple[str, str]:
        """Return the namespace that a study's name within the scheduler stands for, and its name there."""
        first, dot, rest = study.partition(".")
        is_away = dot and rest and first != self.namespace and first in self.namespaces
        return (first, rest) if is_away else (self.namespace, study)

    def objection_to(self, study: str, namespace: str) -> str | None:
        """Why a study of that namespace cannot be called so within the scheduler."""
        place = self.place_of(study)[0]
        if place == namespace:
            return None
        return f"{study!r} begins with the prefix of studies of namespace {place}; choose another name"


def read_settings(path: Path) -> ClusterSettings:
    """Read the chart's file, whose names are in camel case; raises InvalidClusterSettings."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise InvalidClusterSettings(f"the cluster's settings in {path} cannot be read: {error}") from error
    return settings_from(document)


def settings_from(document: Any) -> ClusterSettings:
    if not isinstance(document, Mapping):
        raise InvalidClusterSettings(f"the cluster's settings are {document!r:.80}; they must map names to values")
    fields_by_key = {camel(each.name): each for each in fields(ClusterSettings)}
    unknown = set(document) - set(fields_by_key)
    if unknown:
        raise InvalidClusterSettings(
            f"the setting {min(unknown)!r} is not known; the settings are {', '.join(sorted(fields_by_key))}"
        )
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = fields_by_key[key].name
        if value is None:
            continue
        if name == "namespaces":
            value = tuple(value)
        elif name == "slot":
            value = {resource: str(amount) for resource, amount in value.items()}
        values[name] = value
    return ClusterSettings(**values)


@dataclass(frozen=True, slots=True)
class Owner:
    trial_id: str
    name: str
    namespace: str
    uid: str
    study: str
    templates: Sequence[Mapping[str, Any]] = ()
    """Pod templates, the study's and then the trial's: each adds to the one before."""
    image: str = ""
    preemptible: bool = True
    queue: str = ""
    """Kueue's local queue, where it is installed."""
