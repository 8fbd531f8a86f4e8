"""The API server as trial store: one custom resource a trial, read once, then kept in memory and written through.

How writes get there is `backing`, what users do to resources is `following`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trials.kubernetes.client.api import ClusterApi
from trials.kubernetes.resources.backing import ClusterBacking
from trials.kubernetes.resources.following import Following
from trials.kubernetes.settings import ClusterSettings, Owner
from trials.store.memory import TrialStore


class KubernetesTrialStore(TrialStore):
    """Store of trials as custom resources, all read when it is made; raises StoreUnavailable without an answer.

    ``following`` is to be told what the watches tell.
    """

    def __init__(self, api: ClusterApi, settings: ClusterSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._resources = ClusterBacking(api, settings, clock)
        super().__init__(self._resources)
        self.following = Following(api, settings, self, self._resources, clock)
        self.following.take_all()
        self._resources.start()

    def flush(self) -> None:
        """Send what has only been noted; what fails waits on."""
        self._resources.flush()

    def owner_of(self, trial_id: str) -> Owner:
        """Return what a trial's pods belong to and are made from."""
        kept = self._resources.of(trial_id)
        record = self.trial(trial_id)
        below = self._below(record.spec.study)

        def last(field: str) -> str:
            return next((each[field] for each in reversed(below) if each.get(field)), "")

        return Owner(
            trial_id=trial_id,
            name=kept.name,
            namespace=kept.namespace,
            uid=kept.uid,
            study=record.spec.study,
            templates=tuple(filter(None, (*(each.get("template") for each in below), kept.template))),
            image=last("image"),
            preemptible=record.spec.preemptible,
            queue=kept.queue or kept.labels.get("kueue.x-k8s.io/queue-name", "") or last("queueName"),
        )

    def _below(self, study: str) -> list[Mapping[str, Any]]:
        """Return the specs of the studies that shape a trial's pods: the one under its title, then its own."""
        own = self._resources.studies.get(study)
        if own is None:
            return []
        title = own.spec.get("title") or ""
        called = self._resources.studies.get(self._settings.name_of(own.namespace, title))
        return [each.spec for each in (called, own) if each is not None]

    def show(self, trial_id: str, shown: Mapping[str, Any]) -> None:
        """Note fields of a trial's status that are for people; sent with the next changes."""
        self._resources.note(trial_id, shown)

    def show_study(self, name: str, shown: Mapping[str, Any]) -> None:
        """Write fields of a study's status that are for people."""
        self._resources.show_study(name, shown)

    def remove(self, trial_id: str) -> None:
        """Delete an ended trial's resource."""
        self._resources.remove(trial_id)
