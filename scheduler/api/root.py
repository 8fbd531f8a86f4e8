"""Composition root: store, site, loop and API put together, the same for a machine, Slurm and a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.api.service import Service
from scheduler.api.site import Site
from scheduler.api.tokens import Tokens
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.policy import policy_by_name
from trials.store import TrialStore


def assemble(
    store: TrialStore,
    site: Site,
    tokens: Tokens,
    *,
    policy: str,
    url: str,
    state_dir: Path,
    is_shared: bool = True,
    **of_loop: Any,
) -> Service:
    """Put a scheduler together that replicas reach at ``url``; ``site.begin`` then starts what it gives slots of.

    ``is_shared``: several users' studies run here, so that replicas inherit only what is the machine's. ``of_loop``:
    further ``LoopSettings``.
    """
    clock = SteadyClock()
    settings = LoopSettings(
        state_dir=state_dir,
        api_url=lambda: url,
        replica_token=tokens.for_replica,
        base_environ=site.environ(is_shared=is_shared),
        shares_files=not site.runs_elsewhere,
        one_machine=site.is_one_machine,
        **of_loop,
    )
    loop = ControlLoop(store, site.launcher, policy_by_name(policy), settings, clock=clock)
    site.call_on_change(loop.wake)
    return Service(store, loop, tokens, site, clock=clock)


class SteadyClock:
    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()
