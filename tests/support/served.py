"""A control loop behind its API, served from a thread of this process, with any launcher and any policy."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import uvicorn

from scheduler.api.app import api_config
from scheduler.api.service import Service
from scheduler.api.site import Site
from scheduler.api.tokens import Tokens
from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerUnreachable
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.snapshot import Policy
from tests.support.waiting import until
from trials.agents.roster import Roster
from trials.launch import Launcher
from trials.store import TrialStore

OWNERS_TOKEN = "a token for the tests"


class ServedLoop:
    def __init__(
        self,
        folder: Path,
        store: TrialStore,
        launcher: Launcher,
        policy: Policy,
        *,
        environ: Mapping[str, str] | None = None,
        roster: Roster | None = None,
        **settings: Any,
    ) -> None:
        self.store = store
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tokens = Tokens(OWNERS_TOKEN)
        self.loop = ControlLoop(
            store,
            launcher,
            policy,
            LoopSettings(
                state_dir=folder,
                api_url=lambda: self.url,
                replica_token=tokens.for_replica,
                base_environ={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
                **settings,
            ),
        )
        self.tokens = tokens
        site = Site(launcher)
        site.roster = roster
        self._service = Service(store, self.loop, tokens, site)
        self._server = uvicorn.Server(api_config(self._service))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._listener = listener
        self._thread.start()

    def wait_until_it_answers(self) -> None:
        def answers(client: SchedulerClient) -> bool:
            try:
                client.check()
                return True
            except SchedulerUnreachable:
                return False

        with closing(self.client()) as client:
            until(lambda: answers(client), 30.0, "the scheduler answers")

    def client(self) -> SchedulerClient:
        return SchedulerClient(self.url, OWNERS_TOKEN)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20.0)
        self._listener.close()
