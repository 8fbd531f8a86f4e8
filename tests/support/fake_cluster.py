"""An API server without a server: documents in memory that go through JSON, merge patches, and the errors of one."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from typing import Any

from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.client.api import Collection
from trials.kubernetes.names import Document


class FakeClusterApi:
    def __init__(self) -> None:
        self.objects: dict[tuple[str, str | None, str], Document] = {}
        self._versions = itertools.count(1)
        self._lock = threading.RLock()
        self.down = False
        """Set to have every call fail before it does anything."""
        self.lose_answers = False
        """Set to have every change done, and fail all the same."""
        self.calls: list[tuple[str, str, str | None]] = []

    def _begin(self, what: str, kind: Collection, name: str | None) -> None:
        self.calls.append((what, kind.plural, name))
        if self.down:
            raise ClusterUnreachable("the API server does not answer")

    def _answer(self, document: Mapping[str, Any]) -> Document:
        if self.lose_answers:
            raise ClusterUnreachable("the answer got lost")
        copied: Document = json.loads(json.dumps(document))
        return copied

    def _find(self, kind: Collection, namespace: str | None, name: str) -> Document:
        try:
            return self.objects[kind.plural, namespace, name]
        except KeyError:
            raise ClusterRefused(f"{kind.plural} {name!r} not found", status=404, is_gone=True) from None

    def get(self, kind: Collection, namespace: str | None, name: str) -> Document:
        with self._lock:
            self._begin("get", kind, name)
            return self._answer(self._find(kind, namespace, name))

    def list(self, kind: Collection, namespace: str | None = None, labels: str = "") -> Document:
        with self._lock:
            self._begin("list", kind, None)
            wanted = dict(pair.split("=") for pair in labels.split(",") if pair)
            found = [
                document
                for (plural, where, _), document in self.objects.items()
                if plural == kind.plural
                and namespace in (None, where)
                and wanted.items() <= (document["metadata"].get("labels") or {}).items()
            ]
            return self._answer({"items": found, "metadata": {"resourceVersion": "1"}})

    def create(self, kind: Collection, namespace: str | None, document: Mapping[str, Any]) -> Document:
        with self._lock:
            copied: Document = json.loads(json.dumps(document))
            metadata = copied["metadata"]
            name = metadata.setdefault("name", f"{metadata.get('generateName', '')}{next(self._versions)}")
            self._begin("create", kind, name)
            if (kind.plural, namespace, name) in self.objects:
                raise ClusterRefused(f"{kind.plural} {name!r} already exists", status=409)
            copied.pop("status", None)
            metadata |= {
                "namespace": namespace,
                "uid": f"uid-{next(self._versions)}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            self._store(kind, namespace, name, copied)
            return self._answer(copied)

    def _store(self, kind: Collection, namespace: str | None, name: str, document: Document) -> None:
        document["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[kind.plural, namespace, name] = document

    def patch(
        self, kind: Collection, namespace: str | None, name: str, change: Mapping[str, Any], part: str | None = None
    ) -> Document:
        with self._lock:
            self._begin("patch", kind, name)
            present = self._find(kind, namespace, name)
            change = json.loads(json.dumps(change))
            if part == "status":
                change = {"status": change.get("status", {})}
            else:
                change = {key: value for key, value in change.items() if key != "status"}
                version = change.get("metadata", {}).get("resourceVersion")
                if version not in (None, present["metadata"]["resourceVersion"]):
                    raise ClusterRefused("the object has been modified", status=409)
            changed = merge_patch(present, change)
            self._store(kind, namespace, name, changed)
            metadata = changed["metadata"]
            if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
                del self.objects[kind.plural, namespace, name]
            return self._answer(changed)

    def delete(self, kind: Collection, namespace: str | None, name: str, *, grace_seconds: int | None = None) -> None:
        with self._lock:
            self._begin("delete", kind, name)
            document = self.objects.get((kind.plural, namespace, name))
            if document is None:
                return
            if document["metadata"].get("finalizers"):
                document["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
            else:
                del self.objects[kind.plural, namespace, name]
            self._answer({})


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result
