"""The API over a real store, with the control loop asleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from scheduler.api.app import create_app
from scheduler.api.service import Service
from scheduler.api.site import Site as SchedulerSite
from scheduler.api.tokens import Tokens
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.policy import GoodputPolicy
from trials.launch import InMemoryLauncher
from trials.record import ReplicaRecord
from trials.store import sql_store

TOKENS = Tokens("a token of the owner")


class Site:
    def __init__(self, folder: Path) -> None:
        self.store = sql_store(f"sqlite:///{folder / 'trials.db'}")
        self.launcher = InMemoryLauncher({"n0": 2})
        settings = LoopSettings(
            state_dir=folder, api_url=lambda: "http://x", replica_token=TOKENS.for_replica, base_environ={}
        )
        self.loop = ControlLoop(self.store, self.launcher, GoodputPolicy(), settings)
        self.loop.start = lambda: None  # type: ignore[method-assign]
        self.service = Service(self.store, self.loop, TOKENS, SchedulerSite(self.launcher))
        self.http = TestClient(create_app(self.service))

    def call(self, method: str, path: str, body: Any = None, token: str = TOKENS.owner, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        return self.http.request(method, path, json=body, headers=headers, **options)

    def replica(self, method: str, path: str, body: Any = None, name: str = "", **options: Any) -> Any:
        headers = {"X-Elastune-Replica": name}
        return self.call(method, f"/replica{path}", body, token=TOKENS.for_replica(name), headers=headers, **options)

    def submit(self, number: int = 0, **changes: Any) -> dict[str, Any]:
        document = {"study": "s", "number": number, "entrypoint": "m:f", **changes}
        answer = self.call("POST", "/trials", document)
        assert answer.status_code == 200, answer.text
        submitted: dict[str, Any] = answer.json()
        return submitted

    def with_replica(self, number: int = 0) -> str:
        trial_id = self.submit(number)["trial_id"]
        name = f"{trial_id}-abc"
        self.store.add_replica(
            ReplicaRecord(replica_id=name, trial_id=trial_id, node="n0", slot=0, launch_index=0, launched_at=1.0, pid=1)
        )
        self.launcher.running[name] = None  # type: ignore[assignment]
        return name
