"""Amounts that pods request, in numbers: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from kubernetes.utils import parse_quantity

Amounts = dict[str, Decimal]
"""Amounts by name of a resource, such as cpu or nvidia.com/gpu."""


@lru_cache(maxsize=4096)
def amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))


def requests_of(pod: Mapping[str, Any]) -> Amounts:
    """Return what Kubernetes reserves for a pod: its containers' sum, or what one of its first containers needs alone.

    Newer versions have containers that start first and stay, and amounts for a pod as a whole.
    """
    spec = pod.get("spec") or {}
    total: Amounts = {}
    for container in spec.get("containers") or ():
        for key, value in _requests(container).items():
            total[key] = total.get(key, Decimal(0)) + value
    first: Amounts = {}
    for container in spec.get("initContainers") or ():
        stays = container.get("restartPolicy") == "Always"
        for key, value in _requests(container).items():
            if stays:
                total[key] = total.get(key, Decimal(0)) + value
            else:
                first[key] = max(first.get(key, Decimal(0)), value)
    total |= {key: max(total.get(key, Decimal(0)), value) for key, value in first.items()}
    total |= _requests(spec)
    for key, value in (spec.get("overhead") or {}).items():
        total[key] = total.get(key, Decimal(0)) + amount(value)
    return total


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    named = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: amount(value) for key, value in named.items()}
