"""A copy in memory of all objects of a kind, kept up to date by a watch and compared with the server now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.informer import ADDED, DELETED, MODIFIED, SharedInformer

from trials.errors import ClusterUnreachable
from trials.kubernetes.api import Collection, KubernetesApi

Document = dict[str, Any]

RESYNC_SECONDS = 300
PAUSE_SECONDS = 1.0
"""Before a watch or list that failed is tried again: the library itself would not wait."""
STALE_SECONDS = 30.0
"""A watch whose server is silent beyond its own time limit for so long is dead."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Metadata:
    resource_version: str | None


@dataclass(slots=True)
class _Listing:
    items: list[Document]
    metadata: _Metadata = field(default_factory=lambda: _Metadata(None))


class Watched:
    """``heard``: called from the watching thread with each object that is there or has changed; ``gone`` likewise.

    ``trim`` takes away what nobody reads, in place.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: Collection,
        *,
        namespace: str | None = None,
        labels: str = "",
        trim: Callable[[Document], None] = lambda _: None,
        heard: Callable[[Document], None] = lambda _: None,
        gone: Callable[[Document], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._trim = trim
        self._heard = heard
        self._synced = threading.Event()
        self._informer = SharedInformer(self._listing, resync_period=RESYNC_SECONDS)
        for event in (ADDED, MODIFIED):
            self._informer.add_event_handler(event, self._take)
        self._informer.add_event_handler(DELETED, gone)

    def start(self) -> None:
        self._informer.start()

    def wait_until_synced(self, seconds: float) -> None:
        """Raises ClusterUnreachable when the first list has not come by then."""
        if not self._synced.wait(seconds):
            raise ClusterUnreachable(f"the API server did not list {self._kind.plural} within {seconds:.0f} s")
        # The list is in the cache a moment after it was handed over.
        time.sleep(0.01)

    def objects(self) -> Sequence[Document]:
        found: Sequence[Document] = self._informer.cache.list()
        return found

    def find(self, namespace: str, name: str) -> Document | None:
        found: Document | None = self._informer.cache.get_by_key(f"{namespace}/{name}" if namespace else name)
        return found

    def _take(self, document: Document) -> None:
        document["metadata"].pop("managedFields", None)
        self._trim(document)
        self._heard(document)

    def _listing(
        self,
        *,
        watch: bool = False,
        resource_version: str | None = None,
        timeout_seconds: int = RESYNC_SECONDS,
        **_: Any,
    ) -> object:
        """What the informer calls for a list, and for the stream of a watch."""
        query = {"labelSelector": self._labels} if self._labels else {}
        path = self._kind.path(self._namespace)
        try:
            if not watch:
                return self._list(path, query)
            query |= {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(timeout_seconds),
                "resourceVersion": resource_version or "0",
            }
            response = self._api.raw("GET", path, query=query, timeout=(3.0, timeout_seconds + STALE_SECONDS))
            if response.status >= 400:
                raise ApiException(status=response.status, reason=response.read()[:300])
            return response.response
        except Exception as error:
            gone = isinstance(error, ApiException) and error.status == 410
            if not gone:
                logger.warning("watch interrupted kind=%s error=%s", self._kind.plural, error)
                time.sleep(PAUSE_SECONDS)
            raise ApiException(status=410 if gone else 503, reason=str(error)) from error

    def _list(self, path: str, query: Mapping[str, str]) -> _Listing:
        answer = self._api.request("GET", path, query=query)
        items = answer.get("items") or []
        for document in items:
            document["metadata"].pop("managedFields", None)
            self._trim(document)
        self._synced.set()
        return _Listing(items, _Metadata(answer["metadata"].get("resourceVersion")))
