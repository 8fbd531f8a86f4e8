"""Requests to the API server with plain JSON documents; the one place that knows the client library.

Reads and writes of one kind of resource look alike whatever it is, so a `Collection` names the kind once. Generated
models are left out: turning 4,000 pods into them takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError, InsecureRequestWarning
from urllib3.util.retry import Retry

from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.names import GROUP, VERSION, Document

logger = logging.getLogger(__name__)

MERGE_PATCH = "application/merge-patch+json"
TIMEOUT = (3.0, 15.0)
"""Seconds to connect and to wait for an answer."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A kind of resource: ``prefix`` is ``/api/v1`` or ``/apis/GROUP/VERSION``."""

    prefix: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
        pieces = [self.prefix]
        if namespace is not None:
            pieces += ["namespaces", namespace]
        pieces.append(self.plural)
        pieces += [piece for piece in (name, part) if piece is not None]
        return "/".join(pieces)


PODS = Collection("/api/v1", "pods")
NODES = Collection("/api/v1", "nodes")
QUOTAS = Collection("/api/v1", "resourcequotas")
SECRETS = Collection("/api/v1", "secrets")
SERVICES = Collection("/api/v1", "services")
EVENTS = Collection("/api/v1", "events")
LEASES = Collection("/apis/coordination.k8s.io/v1", "leases")
TRIALS = Collection(f"/apis/{GROUP}/{VERSION}", "trials")
STUDIES = Collection(f"/apis/{GROUP}/{VERSION}", "studies")
TOKEN_REVIEWS = Collection("/apis/authentication.k8s.io/v1", "tokenreviews")
WEBHOOKS = Collection("/apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations")


class ClusterApi(Protocol):
    """Every call raises ClusterRefused (with the HTTP status) or ClusterUnreachable."""

    def get(self, kind: Collection, namespace: str | None, name: str) -> Document: ...

    def list(self, kind: Collection, namespace: str | None = None, labels: str = "") -> Document: ...

    def create(self, kind: Collection, namespace: str | None, document: Mapping[str, Any]) -> Document: ...

    def patch(
        self, kind: Collection, namespace: str | None, name: str, change: Mapping[str, Any], part: str | None = None
    ) -> Document:
        """Apply a merge patch (RFC 7386): what is null in it is removed."""
        ...

    def delete(self, kind: Collection, namespace: str | None, name: str, *, grace_seconds: int | None = None) -> None:
        """Delete an object; do nothing when it is not there."""
        ...


class KubernetesApi:
    """Thread-safe. ``retries`` are left to the callers: each of their actions is repeated at the next look anyway."""

    def __init__(self, api_client: client.ApiClient) -> None:
        self.client = api_client

    @classmethod
    def connect(cls) -> KubernetesApi:
        """Connect as this process's pod, or as KUBECONFIG says; raise ClusterUnreachable."""
        settings = client.Configuration()
        try:
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise ClusterUnreachable(
                f"no Kubernetes cluster is configured: {error}; set KUBECONFIG to a file that names one, or run in "
                "one of its pods"
            ) from error
        if not settings.verify_ssl:
            # That is what KUBECONFIG asks for; to say so at every request helps nobody.
            logger.warning("KUBECONFIG turns off the check of the API server's certificate")
            urllib3.disable_warnings(InsecureRequestWarning)
        settings.retries = Retry(total=0)
        settings.keep_alive = True
        settings.connection_pool_maxsize = 32
        return cls(client.ApiClient(settings))

    def get(self, kind: Collection, namespace: str | None, name: str) -> Document:
        return self.request("GET", kind.path(namespace, name))

    def list(self, kind: Collection, namespace: str | None = None, labels: str = "") -> Document:
        return self.request("GET", kind.path(namespace), query={"labelSelector": labels} if labels else None)

    def create(self, kind: Collection, namespace: str | None, document: Mapping[str, Any]) -> Document:
        return self.request("POST", kind.path(namespace), document)

    def patch(
        self, kind: Collection, namespace: str | None, name: str, change: Mapping[str, Any], part: str | None = None
    ) -> Document:
        return self.request("PATCH", kind.path(namespace, name, part), change, content=MERGE_PATCH)

    def delete(self, kind: Collection, namespace: str | None, name: str, *, grace_seconds: int | None = None) -> None:
        options = {"propagationPolicy": "Background"} | (
            {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        )
        try:
            self.request("DELETE", kind.path(namespace, name), options)
        except ClusterRefused as error:
            if error.status != 404:
                raise

    def log(self, namespace: str, pod: str, *, most_bytes: int) -> str:
        """Return the end of what the pod's replica printed."""
        query = {"limitBytes": str(most_bytes), "tailLines": "20000"}
        return self._send("GET", PODS.path(namespace, pod, "log"), None, query, "application/json", (1.0, 3.0)).decode(
            errors="replace"
        )

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Document:
        answer = self._send(method, path, body, query, content, TIMEOUT)
        document: Document = json.loads(answer) if answer else {}
        return document

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        content: str,
        timeout: tuple[float, float],
    ) -> bytes:
        try:
            response = self.raw(method, path, body, query=query, content=content, timeout=timeout)
            data: bytes = response.read()
        except (HTTPError, ApiException, OSError) as error:
            raise ClusterUnreachable(f"the API server does not answer {method} {path}: {error}") from error
        if response.status >= 500 or response.status == 429:
            raise ClusterUnreachable(f"the API server cannot process {method} {path} now: {_read_refusal(data)[0]}")
        if response.status >= 400:
            message, names_object = _read_refusal(data)
            raise ClusterRefused(message, status=response.status, is_gone=response.status == 404 and names_object)
        return data

    def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        timeout: tuple[float, float] | None = None,
    ) -> Any:
        """Return the library's response, whatever its status and not read yet."""
        call = self.client.param_serialize(
            method=method,
            resource_path=path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content},
            auth_settings=["BearerToken"],
        )
        # The library would take empty texts in a body for null.
        return self.client.call_api(*call[:3], body=body, _request_timeout=timeout)


def _read_refusal(data: bytes) -> tuple[str, bool]:
    """Return the message of a Status (meta/v1), and whether it names the object that it is about."""
    try:
        status = json.loads(data)
        return str(status["message"]), bool((status.get("details") or {}).get("name"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return data.decode(errors="replace")[:300], False
