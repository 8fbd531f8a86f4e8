"""Policies of others, to compare with: as published, in the words of this suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler.allocation.groups import assign_by_room
from scheduler.policy import POLICIES, policy_by_name
from scheduler.policy.constrained import ConstrainedPolicy
from scheduler.simulator.rivals.in_order import AshaStaticPolicy, OptimusPolicy, TiresiasPolicy
from scheduler.simulator.rivals.pollux import PolluxPolicy, PolluxSearchPolicy
from scheduler.simulator.rivals.sia import SiaPolicy, assign_by_programme
from scheduler.snapshot import Policy

RIVALS: Mapping[str, Callable[[], Policy]] = {
    "asha_static": AshaStaticPolicy,
    "optimus": OptimusPolicy,
    "pollux": PolluxPolicy,
    "pollux_search": PolluxSearchPolicy,
    "sia": SiaPolicy,
    "tiresias": TiresiasPolicy,
}
COMPARED = sorted({*POLICIES, *RIVALS})
"""Names of all policies that can be simulated."""


def compared_policy(name: str) -> Policy:
    """One of ours or theirs. Raises ValueError for a name that does not exist."""
    if name in POLICIES:
        return policy_by_name(name)
    if name not in RIVALS:
        raise ValueError(f"policy {name!r} is not known; choose one of {', '.join(COMPARED)}")
    return ConstrainedPolicy(RIVALS[name](), assign=assign_by_programme if name == "sia" else assign_by_room)
