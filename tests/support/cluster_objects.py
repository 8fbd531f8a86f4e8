"""Nodes and pods as an API server shows them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trials.kubernetes.names import Document
from trials.launch.base import LaunchRequest


def node(name: str, gpus: int = 4, *, ready: bool = True, cpu: str = "16", **spec: Any) -> Document:
    return {
        "metadata": {"name": name, "labels": spec.pop("labels", {})},
        "spec": spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": cpu, "memory": "64Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def pod(
    name: str,
    on: str,
    *,
    gpus: int = 0,
    cpu: str = "100m",
    labels: dict[str, str] | None = None,
    phase: str = "Running",
    **status: Any,
) -> Document:
    requests = {"cpu": cpu} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": labels or {},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"nodeName": on, "containers": [{"name": "main", "resources": {"requests": requests}}]},
        "status": {"phase": phase, **status},
    }


def quota(hard: dict[str, str], used: dict[str, str] | None = None, namespace: str = "team", **spec: Any) -> Document:
    return {
        "metadata": {"name": "limits", "namespace": namespace},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def request(**changes: Any) -> LaunchRequest:
    fields: dict[str, Any] = {
        "replica_id": "t-0-abcd1234",
        "trial_id": "t-0",
        "node": "n1",
        "slot": 2,
        "entrypoint": "m:f",
        "environ": {
            "ELASTUNE_API": "http://10.0.0.1:7300",
            "ELASTUNE_HOST": "127.0.0.1",
            "ELASTUNE_CHECKPOINT_DIR": "/var/lib/elastune/checkpoints/t-0",
            "ELASTUNE_PREPARED_DIR": "/var/lib/elastune/prepared/s-0",
            "MINE": "1",
        },
        "working_dir": "/home/me/project",
        "python_path": ("/home/me/project",),
        "preload": (),
        "code": (),
        "log": Path("/unused"),
        **changes,
    }
    return LaunchRequest(**fields)
