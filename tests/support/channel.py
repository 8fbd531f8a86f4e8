"""A replica's line to a scheduler that a test plays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2

from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment

REPLICA = ReplicaEnvironment(
    api_url="http://scheduler",
    token="secret",
    trial_id="t",
    replica_id="t-1",
    launch_index=0,
    checkpoint_dir=Path("/unused"),
    node="n",
    slot=0,
)


def channel_to(answer: Callable[[httpx2.Request], httpx2.Response]) -> ControlChannel:
    """Of a replica whose token is ``secret``."""
    return ControlChannel(REPLICA, transport=httpx2.MockTransport(answer))
