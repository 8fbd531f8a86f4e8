"""Settings of a control loop, from the scheduler that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    state_dir: Path
    api_url: Callable[[], str]
    """Address by which replicas reach the scheduler; known once the server listens."""
    replica_token: Callable[[str], str]
    """A replica's own, by its id."""
    base_environ: Mapping[str, str]
    """Environment that replicas inherit."""
    server_file: Path | None = None
    decide_every_seconds: float = 0.0
    """Least time between two decisions of the policy; in between, the last one is carried out. 0: at every tick."""
    silence_seconds: float = 45.0
    """A replica that has been heard of and then says nothing for so long hangs: it is ended, and its trial heals."""
    decide_on_loss_or_end: bool = False
    """Do not wait for that time when a replica is gone or a trial over."""
    leaving_seconds: float = 1.0
    """Seconds for replicas of a finished trial to end by themselves."""
    shares_files: bool = False
    """Replicas see the scheduler's files, as on its own machine: they find there what comes after they have started."""
    one_machine: bool = False
    """Replicas run on the scheduler's machine, all of them."""
    may_act: Callable[[], bool] = lambda: True
    """Tells whether this scheduler still is the one that decides; otherwise it only answers."""
    move_patience_seconds: float = 10.0
    """A trial that is to move to slots which others hold waits so long before it gives up its own."""
