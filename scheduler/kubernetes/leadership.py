"""One scheduler at a time: a lease in the API server, held by the one that leads."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.leaderelection.electionconfig import Config
from kubernetes.leaderelection.leaderelection import LeaderElection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock
from urllib3.exceptions import HTTPError

from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.client.api import LEASES, KubernetesApi

LEASE_SECONDS = 15
RENEW_SECONDS = 10
"""Seconds without renewal after which a leader stops, before somebody else may begin."""
RETRY_SECONDS = 2

logger = logging.getLogger(__name__)


class Lease(LeaseLock):
    """The lease as one process sees it.

    An API server that is away is no reason to give the election up, nor one to act on: `is_fresh` tells whether nobody
    else can have begun to lead. ``led_by_other`` is called when somebody else holds a lease that this process held.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        led_by_other: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, namespace, identity)
        calls: Any = _Hasty(client.CoordinationV1Api(api.client))
        self.api_instance = calls
        self._led_by_other = led_by_other
        self._monotonic = monotonic
        self._renewed_at = float("-inf")
        self._was_held = False
        self._given_up = False

    def give_up(self) -> None:
        self._given_up = True

    def is_fresh(self) -> bool:
        return self._monotonic() - self._renewed_at < RENEW_SECONDS

    def get(self, name: str, namespace: str) -> Any:
        try:
            is_there, record = super().get(name, namespace)
        except (HTTPError, OSError) as error:
            return False, ApiException(status=0, reason=str(error))
        holder = getattr(record, "holder_identity", None) if is_there else None
        if self._was_held and holder and holder != self.identity:
            self._led_by_other(holder)
        return is_there, record

    def create(self, name: str, namespace: str, election_record: Any) -> Any:
        return self._noting(lambda: super(Lease, self).create(name, namespace, election_record))

    def update(self, name: str, namespace: str, updated_record: Any) -> Any:
        return self._noting(lambda: super(Lease, self).update(name, namespace, updated_record))

    def _noting(self, write: Callable[[], bool]) -> bool:
        if self._given_up:
            return False
        # The lease counts from when it was asked for, not from when the answer came.
        asked = self._monotonic()
        try:
            done = bool(write())
        except (HTTPError, OSError):
            return False
        if done:
            self._renewed_at = asked
            self._was_held = True
        return done


class _Hasty:
    """The client's calls with a time limit: one that hangs must not keep the lease from being judged."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._calls, name), _request_timeout=(2.0, 4.0))


def lead_when_elected(lease: Lease, lead: Callable[[], None]) -> None:
    """Stand for election until elected, call ``lead`` in a thread of its own, and renew; returns when that fails."""
    logging.getLogger("leaderelection").setLevel(logging.WARNING)
    LeaderElection(Config(lease, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, lead, lambda: None)).run()


def resign(api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
    """Let another one lead at once instead of when the lease runs out."""
    try:
        lease = api.get(LEASES, namespace, name)
        if (lease.get("spec") or {}).get("holderIdentity") != identity:
            return
        change = {
            "metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]},
            "spec": {"holderIdentity": None},
        }
        api.patch(LEASES, namespace, name, change)
    except (ClusterRefused, ClusterUnreachable) as error:
        logger.info("lease not released, it will expire: %s", error)
