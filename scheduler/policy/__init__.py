"""Policies by name. Each is pure: a snapshot in, grants with reasons out."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.allocation.groups import assign_by_room
from scheduler.policy.asha_static import AshaStaticPolicy
from scheduler.policy.constrained import ConstrainedPolicy
from scheduler.policy.fair_share import FairSharePolicy
from scheduler.policy.fifo import FifoPolicy
from scheduler.policy.goodput import GoodputPolicy, GoodputSettings, assign_by_goodput
from scheduler.policy.optimus import OptimusPolicy
from scheduler.policy.pollux import PolluxPolicy
from scheduler.policy.pollux_search import PolluxSearchPolicy
from scheduler.policy.sia import SiaPolicy, assign_by_programme
from scheduler.policy.tiresias import TiresiasPolicy
from scheduler.policy.top_job import TopJobPolicy
from scheduler.snapshot import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "asha_static": AshaStaticPolicy,
    "fair_share": FairSharePolicy,
    "fifo": FifoPolicy,
    "goodput": GoodputPolicy,
    "optimus": OptimusPolicy,
    "pollux": PolluxPolicy,
    "pollux_search": PolluxSearchPolicy,
    "sia": SiaPolicy,
    "tiresias": TiresiasPolicy,
    "top_job": TopJobPolicy,
}


def policy_by_name(name: str) -> Policy:
    """Raises ValueError for a name that does not exist."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    assign = {"goodput": assign_by_goodput, "sia": assign_by_programme}.get(name, assign_by_room)
    return ConstrainedPolicy(POLICIES[name](), assign=assign, by_share=name == "goodput")


__all__ = ["POLICIES", "GoodputPolicy", "GoodputSettings", "policy_by_name"]
