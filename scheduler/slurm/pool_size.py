"""Size of a pool: how many jobs it should have, and which to take back, as a pure plan of one moment.

The number of slots under which work is cheapest is the autoscaler's. A job that has to wait in the queue is worth less
than one that is there: where the work that runs now takes T seconds longer and a job waits W, it is of use for T - W of
them only, and so its price is that of a job that is there at once, times T / (T - W). Nothing is asked for that would
come too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.allocation.autoscale import AutoscaleSettings, desired_nodes
from scheduler.knowledge.waiting import seconds_left
from scheduler.slurm.pool_settings import PoolSettings
from scheduler.snapshot import Snapshot

FOREVER = 1e9
"""Times its price: a job that would come too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    waiting: tuple[str, ...] = ()
    """Jobs in the queue, oldest first."""
    running: tuple[str, ...] = ()
    """Jobs that have begun, whether their agent has called yet or not."""
    idle: tuple[str, ...] = ()
    """Begun jobs that have been without a replica for long enough, the longest first."""
    slots_per_job: int = 1
    """0 as long as nobody knows."""
    waits_seconds: float = 0.0
    """Expected wait of a job asked for now."""
    used_hours: float = 0.0
    """Slot hours that the pool has taken so far."""
    asked_within_hour: int = 0
    """Slots asked for in the last hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    submit: int = 0
    """Jobs to ask for."""
    take_back: tuple[str, ...] = ()
    """Jobs that wait and are not wanted any more."""
    give_back: tuple[str, ...] = ()
    """Jobs that run, and whose slots nobody wants."""
    limited_by: str = ""
    """Limit of the user's that keeps the pool from being larger, for people."""


def plan_pool(snapshot: Snapshot, settings: PoolSettings, state: PoolState) -> PoolPlan:
    if settings.hours is not None and state.used_hours >= settings.hours:
        # Replicas save their state, and their trials wait with this reason.
        return PoolPlan(
            take_back=state.waiting,
            give_back=state.running,
            limited_by=f"its {settings.hours:g} slot hours are used up",
        )
    present = len(state.waiting) + len(state.running)
    wanted, limited_by = _wanted_jobs(snapshot, settings, state, present)
    if wanted > present:
        room, why = _room_to_ask(settings, state)
        more = min(wanted - present, room)
        return PoolPlan(submit=more, limited_by=why if more < wanted - present else limited_by)
    surplus = present - wanted
    # The youngest first: others have waited longer and come sooner.
    take_back = tuple(reversed(state.waiting))[:surplus]
    return PoolPlan(take_back=take_back, give_back=state.idle[: surplus - len(take_back)], limited_by=limited_by)


def _wanted_jobs(snapshot: Snapshot, settings: PoolSettings, state: PoolState, present: int) -> tuple[int, str]:
    size = max(1, state.slots_per_job)
    least, most = -(-settings.least_slots // size), max(1, settings.most_slots // size)
    pricing = AutoscaleSettings(
        slots=size,
        price_per_hour=settings.price * size,
        least_nodes=least,
        most_nodes=most,
        worth_of_an_hour=settings.worth,
    )
    wanted = desired_nodes(snapshot, pricing, present or None)
    if wanted > present:
        dearer = pricing.price_per_hour * price_of_waiting(snapshot, state.waits_seconds)
        wanted = max(present, desired_nodes(snapshot, replace(pricing, price_per_hour=dearer)))
    if not state.slots_per_job:
        # The first one tells how large they are.
        return min(wanted, 1), ""
    return wanted, f"slots={settings.least_slots}:{settings.most_slots}" if wanted == most else ""


def price_of_waiting(snapshot: Snapshot, waits_seconds: float) -> float:
    """Return how much dearer a job is that comes so late: 1 for one that comes at once."""
    left = max((seconds_left(view) for view in snapshot.eligible if view.held_slots), default=math.inf)
    if any(not view.held_slots for view in snapshot.eligible) or not math.isfinite(left):
        # Somebody has nothing at all, or nobody knows how long it takes.
        return 1.0
    return left / (left - waits_seconds) if left > waits_seconds else FOREVER


def _room_to_ask(settings: PoolSettings, state: PoolState) -> tuple[int, str]:
    if settings.per_hour is None:
        return LARGEST_ARRAY, ""
    room = max(0, settings.per_hour - state.asked_within_hour) // max(1, state.slots_per_job)
    return min(room, LARGEST_ARRAY), f"per-hour={settings.per_hour}"


LARGEST_ARRAY = 500
"""Jobs asked for at once; sites limit arrays to 1001."""


def expected_wait(waits: Sequence[float]) -> float:
    """Return the expected wait of the next job in seconds, from the waits of the last ones."""
    return sorted(waits)[len(waits) // 2] if waits else 0.0
