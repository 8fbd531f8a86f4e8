"""Policies by name. Each is pure: a snapshot in, grants with reasons out."""

from __future__ import annotations

from scheduler.policy.goodput import GoodputPolicy
from scheduler.snapshot import Policy

POLICIES: dict[str, type[GoodputPolicy]] = {GoodputPolicy.name: GoodputPolicy}


def policy_by_name(name: str) -> Policy:
    """Raises ValueError for a name that does not exist."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


__all__ = ["POLICIES", "GoodputPolicy", "policy_by_name"]
