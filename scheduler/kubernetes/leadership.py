"""One scheduler at a time: a lease in the API server, held by the one that leads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.leaderelection.electionconfig import Config
from kubernetes.leaderelection.leaderelection import LeaderElection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock
from urllib3.exceptions import HTTPError

from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.api import LEASES, KubernetesApi

LEASE_SECONDS = 15
RENEW_SECONDS = 10
"""Who has not renewed the lease for so long stops leading, before somebody else may begin."""
RETRY_SECONDS = 2

logger = logging.getLogger(__name__)


class _PatientLock(LeaseLock):
    """An API server that is away for a moment is no reason to give up the election."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str, identity: str) -> None:
        super().__init__(name, namespace, identity)
        self.api_instance = client.CoordinationV1Api(api.client)

    def get(self, name: str, namespace: str) -> Any:
        try:
            return super().get(name, namespace)
        except (HTTPError, OSError) as error:
            return False, ApiException(status=0, reason=str(error))

    def create(self, name: str, namespace: str, election_record: Any) -> Any:
        try:
            return super().create(name, namespace, election_record)
        except (HTTPError, OSError):
            return False

    def update(self, name: str, namespace: str, updated_record: Any) -> Any:
        try:
            return super().update(name, namespace, updated_record)
        except (HTTPError, OSError):
            return False


def lead_when_elected(
    api: KubernetesApi, namespace: str, name: str, identity: str, *, lead: Callable[[], None], lost: Callable[[], None]
) -> None:
    """Stand for election until elected, then call ``lead`` (in a thread of its own) and renew; ``lost`` ends it."""
    logging.getLogger("leaderelection").setLevel(logging.WARNING)
    lock = _PatientLock(api, namespace, name, identity)
    LeaderElection(Config(lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, lead, lost)).run()


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
        logger.info("lease not given back; it runs out error=%s", error)
