"""Whose the token is that a replica shows which runs in a pod: the kubelet has given it to that pod alone.

It stands in no object that anybody could look at, is good for an hour, is replaced by the kubelet, and ends with its
pod. Whether it is genuine is asked of the API server (TokenReview), once for each token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.api.tokens import Access, Identity
from trials.errors import ClusterRefused, TrialsError
from trials.kubernetes.client.api import TOKEN_REVIEWS, ClusterApi

logger = logging.getLogger(__name__)

KEPT = 8192
AT_ONCE = 4
"""Reviews under way; others wait, so that strangers with made-up tokens wear out nobody's API server."""
REFUSED_SECONDS = 60.0
COMPLAINT_SECONDS = 30.0
POD_NAME = "authentication.kubernetes.io/pod-name"


class PodTokens:
    """Callable from any thread. ``namespace_of``: where the pod of a replica is, by its id; None: there is no such."""

    def __init__(
        self,
        api: ClusterApi,
        audience: str,
        namespace_of: Callable[[str], str | None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._audience = audience
        self._namespace_of = namespace_of
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.Semaphore(AT_ONCE)
        self._answers: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()
        """Answers by digest of the token: whose it is, and until when that holds."""
        self._complained_at = float("-inf")

    def known(self, token: str, replica_id: str) -> Identity | None:
        """Return whose token it is, without asking anybody."""
        with self._lock:
            owner, until = self._answers.get(_digest(token), (None, 0.0))
        return Identity(Access.REPLICA, replica_id) if owner == replica_id and until > self._clock() else None

    def ask(self, token: str, replica_id: str) -> Identity | None:
        """Ask the API server whether the token is that of the replica's pod; return its identity or None."""
        claimed = _claims(token)
        namespace = self._namespace_of(replica_id)
        if namespace is None or claimed != (namespace, replica_id):
            return None
        with self._asking:
            with self._lock:
                _, until = self._answers.get(_digest(token), (None, 0.0))
            if until <= self._clock():
                try:
                    self._note(token, replica_id if self._is_genuine(token, namespace, replica_id) else None)
                except TrialsError as error:
                    self._complain(error)
                    raise
        return self.known(token, replica_id)

    def _complain(self, error: TrialsError) -> None:
        """Log the error now and then: every replica asks again several times a second."""
        with self._lock:
            now = self._clock()
            if now - self._complained_at < COMPLAINT_SECONDS:
                return
            self._complained_at = now
        logger.error("replicas' tokens cannot be checked: %s", error)

    def _note(self, token: str, owner: str | None) -> None:
        until = self._clock() + REFUSED_SECONDS if owner is None else _expiry(token)
        with self._lock:
            self._answers[_digest(token)] = owner, until
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)

    def _is_genuine(self, token: str, namespace: str, pod: str) -> bool:
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        try:
            status: Mapping[str, Any] = self._api.create(TOKEN_REVIEWS, None, asked).get("status") or {}
        except ClusterRefused as error:
            if error.status == 403:
                raise ClusterRefused(
                    f"the scheduler is not allowed to review tokens ({error}); update the chart's ClusterRole",
                    status=403,
                ) from error
            raise
        user = status.get("user") or {}
        return (
            bool(status.get("authenticated"))
            and self._audience in (status.get("audiences") or ())
            and str(user.get("username", "")).startswith(f"system:serviceaccount:{namespace}:")
            and (user.get("extra") or {}).get(POD_NAME) == [pod]
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _payload(token: str) -> Mapping[str, Any]:
    """Return the token's unverified claims, which anybody may have written; empty if there are none."""
    try:
        part = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _claims(token: str) -> tuple[str, str] | None:
    """Namespace and name of the pod that it says to be of."""
    own = _payload(token).get("kubernetes.io")
    pod = own.get("pod") if isinstance(own, dict) else None
    return (
        (str(own.get("namespace")), str(pod.get("name"))) if isinstance(own, dict) and isinstance(pod, dict) else None
    )


def _expiry(token: str) -> float:
    expiry = _payload(token).get("exp")
    return float(expiry) if isinstance(expiry, (int, float)) else 0.0
