"""A copy in memory of all objects of a kind, kept up to date by a watch and compared with the server now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.informer import ADDED, BOOKMARK, DELETED, MODIFIED, SharedInformer

from trials.errors import ClusterUnreachable
from trials.kubernetes.client.api import Collection, KubernetesApi
from trials.kubernetes.names import Document

RESYNC_SECONDS = 300
PAUSE_SECONDS = 1.0
"""Before a watch or list that failed is tried again: the library itself would not wait."""
SILENCE_SECONDS = 90.0
"""A watch that brings nothing for so long, not even the mark that comes every minute, may be dead: it is begun anew."""
RETRY_SECONDS = 5.0
"""Before an object is taken up again whose handling failed."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Metadata:
    resource_version: str | None


@dataclass(slots=True)
class _Listing:
    items: list[Document]
    metadata: _Metadata = field(default_factory=lambda: _Metadata(None))


class Watched:
    """All objects of one kind, as a watch keeps them.

    ``heard``: called from the watching thread with each object that is there or has changed; ``gone`` likewise.

    ``trim`` takes away what nobody reads, in place.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: Collection,
        *,
        namespace: str | None = None,
        trim: Callable[[Document], None] = lambda _: None,
        heard: Callable[[Document], None] = lambda _: None,
        gone: Callable[[Document], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._trim = trim
        self._heard = heard
        self._synced = threading.Event()
        self._informer = SharedInformer(self._listing, resync_period=RESYNC_SECONDS)
        for event in (ADDED, MODIFIED):
            self._informer.add_event_handler(event, self._take)
        self._gone = gone
        self._version: str | None = None
        """Resource version to go on watching from. The library would begin again at the last list."""
        self._streams = False
        """True if what comes is a watch's news, and not a list's."""
        self._informer.add_event_handler(DELETED, self._drop)
        self._informer.add_event_handler(BOOKMARK, self._keep_version)

    def start(self) -> None:
        self._informer.start()

    def wait_until_synced(self, seconds: float) -> None:
        """Wait for the first list; raise ClusterUnreachable when it has not come by then."""
        if not self._synced.wait(seconds):
            raise ClusterUnreachable(f"the API server did not list {self._kind.plural} within {seconds:.0f} s")

    def objects(self) -> Sequence[Document]:
        found: Sequence[Document] = self._informer.cache.list()
        return found

    def find(self, namespace: str, name: str) -> Document | None:
        found: Document | None = self._informer.cache.get_by_key(f"{namespace}/{name}" if namespace else name)
        return found

    def _keep_version(self, document: Document) -> None:
        # Objects of a list are as old as their last change: a watch goes on from the list itself.
        if self._streams:
            self._version = document["metadata"].get("resourceVersion") or self._version

    def _take(self, document: Document) -> None:
        self._keep_version(document)
        document["metadata"].pop("managedFields", None)
        self._trim(document)
        self._handle(self._heard, document)

    def _drop(self, document: Document) -> None:
        self._keep_version(document)
        self._handle(self._gone, document)

    def _handle(self, handler: Callable[[Document], None], document: Document) -> None:
        """Handle a document; what fails because the server is away is tried again with what is there by then."""
        try:
            handler(document)
        except Exception as error:
            metadata = document["metadata"]
            logger.warning(
                "could not process a change, will try again kind=%s name=%s error=%s",
                self._kind.plural,
                metadata.get("name"),
                error,
            )
            timer = threading.Timer(RETRY_SECONDS, self._again, args=(handler, document))
            timer.daemon = True
            timer.start()

    def _again(self, handler: Callable[[Document], None], document: Document) -> None:
        metadata = document["metadata"]
        present = self.find(metadata.get("namespace", ""), metadata["name"])
        if handler == self._gone and present is None:
            self._handle(handler, document)
        elif handler == self._heard and present is not None:
            self._handle(handler, present)

    def _listing(
        self,
        *,
        watch: bool = False,
        resource_version: str | None = None,
        timeout_seconds: int = RESYNC_SECONDS,
        **_: Any,
    ) -> object:
        """List for the informer, or stream a watch."""
        path = self._kind.path(self._namespace)
        try:
            if not watch:
                return self._list(path)
            query = {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(timeout_seconds),
                "resourceVersion": self._version or resource_version or "0",
            }
            # By now the first list is in the cache.
            self._synced.set()
            self._streams = True
            response = self._api.raw("GET", path, query=query, timeout=(3.0, SILENCE_SECONDS))
            if response.status >= 400:
                raise ApiException(status=response.status, reason=response.read()[:300])
            return response.response
        except Exception as error:
            gone = isinstance(error, ApiException) and error.status == 410
            if gone:
                self._version = None
            else:
                logger.warning("watch interrupted kind=%s error=%s", self._kind.plural, error)
                time.sleep(PAUSE_SECONDS)
            raise ApiException(status=410 if gone else 503, reason=str(error)) from error

    def _list(self, path: str) -> _Listing:
        answer = self._api.request("GET", path)
        # The informer hands each of them to `_take`, as it does with what the watch brings.
        items = answer.get("items") or []
        self._streams = False
        self._version = answer["metadata"].get("resourceVersion")
        return _Listing(items, _Metadata(self._version))
