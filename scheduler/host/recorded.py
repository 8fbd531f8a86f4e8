"""A state folder whose scheduler has ended, to be looked at: the same API over what it has kept, and nothing runs.

Whatever would change something is refused. The API listens on loopback for as long as somebody looks.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from scheduler.api.app import api_config
from scheduler.api.service import Service
from scheduler.api.site import Site
from scheduler.api.tokens import Tokens
from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.policy import policy_by_name
from scheduler.snapshot import NodeView
from scheduler.state_folder import DATABASE
from trials.launch import InMemoryLauncher
from trials.store import TrialStore, sql_store


@contextmanager
def recorded(folder: Path, port: int = 0) -> Iterator[SchedulerClient]:
    """Serve a finished scheduler's folder; raise SchedulerError where nothing is kept, and StoreUnavailable."""
    path = folder / DATABASE
    if not path.is_file():
        raise SchedulerError(f"{folder} holds no {DATABASE}: no scheduler has stored trials there")
    store = sql_store(f"sqlite:///{path.resolve()}")
    try:
        # Nothing of it is changed: the API refuses what would.
        yield from _serving(folder, store, port)
    finally:
        store.close()


def _serving(folder: Path, store: TrialStore, port: int) -> Iterator[SchedulerClient]:
    tokens = Tokens(secrets.token_hex(24))
    site = Site(InMemoryLauncher({node.name: node.slots for node in nodes_of(store)}))
    settings = LoopSettings(
        state_dir=folder.resolve(), api_url=lambda: "", replica_token=tokens.for_replica, base_environ={}
    )
    loop = ControlLoop(store, site.launcher, policy_by_name("goodput"), settings)
    over = (
        f"the scheduler of {folder} has ended, so nothing can be changed; start one with `elastune up --state-dir "
        f"{folder}`"
    )
    service = Service(store, loop, tokens, site, over=over)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(api_config(service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="elastune-recorded", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.002)
    client = SchedulerClient(f"http://127.0.0.1:{listener.getsockname()[1]}", tokens.owner)
    try:
        yield client
    finally:
        client.close()
        server.should_exit = True
        thread.join(timeout=5.0)
        listener.close()


def nodes_of(store: TrialStore) -> tuple[NodeView, ...]:
    """Return the nodes that trials were on, as large as was used of them."""
    slots: dict[str, int] = {}
    for interval in store.slot_intervals():
        slots[interval.node] = max(slots.get(interval.node, 0), interval.slot + 1)
    return tuple(NodeView(name=name, slots=count) for name, count in sorted(slots.items()))
