"""Runs one workload under several policies, each with what its authors let it know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.rivals import compared_policy
from scheduler.simulator.training import Request
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import SimulationResult, World
from scheduler.snapshot import Policy

Information = Literal["own", "declared", "pooled"]
"""What a policy may know of a job: what it has measured itself; its declared epochs as well; what all jobs that run
the same code have measured as well."""

REQUESTS: dict[str, Request] = {"fifo": "rigid", "asha_static": "rigid", "tiresias": "rigid", "optimus": "fixed_batch"}
"""Policies for jobs whose users choose the size, or the batch size; all others adapt both."""
ORACLES = frozenset({"optimus"})
OWN_ONLY = frozenset({"pollux"})
"""Uses nothing beyond what each job has measured, whatever is offered."""


def settings_for(name: str, settings: SimulationSettings, information: Information) -> SimulationSettings:
    own = name in OWN_ONLY or information == "own"
    return replace(
        settings,
        request=REQUESTS.get(name, "elastic"),
        oracle=name in ORACLES,
        declares_length=not own,
        pools=not own and information == "pooled",
    )


def compare(
    submissions: Sequence[Submission],
    policies: Iterable[str],
    settings: SimulationSettings,
    information: Information = "pooled",
    *,
    world: Callable[[Sequence[Submission], Policy, SimulationSettings], World] = World,
    on_done: Callable[[SimulationResult], None] = lambda result: None,
) -> list[SimulationResult]:
    """One result a policy, in order; raises ValueError for a name that does not exist."""
    chosen = [(name, compared_policy(name)) for name in policies]
    results = []
    for name, policy in chosen:
        results.append(world(submissions, policy, settings_for(name, settings, information)).run())
        on_done(results[-1])
    return results
