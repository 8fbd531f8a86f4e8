"""Policies by name. Each is pure: a snapshot in, grants with reasons out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler.allocation.groups import assign_by_room
from scheduler.policy.constrained import ConstrainedPolicy
from scheduler.policy.goodput import GoodputPolicy, assign_by_goodput
from scheduler.policy.simple import FifoPolicy, fair_share, top_job
from scheduler.snapshot import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fair_share": fair_share,
    "fifo": FifoPolicy,
    "goodput": GoodputPolicy,
    "top_job": top_job,
}


def policy_by_name(name: str) -> Policy:
    """Return the policy of that name. Raises ValueError for a name that does not exist."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    ours = name == "goodput"
    assign = assign_by_goodput if ours else assign_by_room
    return ConstrainedPolicy(POLICIES[name](), assign=assign, by_share=ours, chooses_layouts=ours)


__all__ = ["POLICIES", "GoodputPolicy", "policy_by_name"]
