"""Assembles the API and holds what its two sides share: store, loop, mailbox, and the signals that end long polls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from scheduler.api.mailbox import Mailbox
from scheduler.api.tokens import Tokens
from scheduler.control_loop import ControlLoop
from scheduler.snapshot import NodeView
from trials.errors import InvalidTrialSpec, StoreUnavailable, UnknownTrial
from trials.store import TrialStore


@dataclass(slots=True)
class Service:
    """What the handlers work with. ``changed`` is replaced and set whenever the control loop has looked at things."""

    store: TrialStore
    loop: ControlLoop
    tokens: Tokens
    nodes: Callable[[], tuple[NodeView, ...]]
    mailbox: Mailbox = field(default_factory=Mailbox)
    rendezvous: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    event_loop: asyncio.AbstractEventLoop | None = None

    def announce(self) -> None:
        """Let everybody who waits look again. Callable from any thread."""
        if self.event_loop is not None and not self.event_loop.is_closed():
            self.event_loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for_change(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.changed.wait(), max(0.0, seconds))
        except TimeoutError:
            return


def bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise HTTPException(401, "this scheduler needs a token: send 'Authorization: Bearer TOKEN'")
    return token


def create_app(service: Service) -> FastAPI:
    # Imported here: both modules use Service and bearer from this one.
    from scheduler.api.client_side import client_routes
    from scheduler.api.replica_side import replica_routes

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.event_loop = asyncio.get_running_loop()
        service.loop.start()
        yield
        await asyncio.to_thread(service.loop.stop)

    app = FastAPI(title="Elastune scheduler", lifespan=lifespan)
    app.state.service = service
    app.include_router(client_routes(service))
    app.include_router(replica_routes(service))

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    def refuse(status: int) -> Callable[[Request, Exception], Any]:
        async def handler(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"detail": str(error)}, status_code=status)

        return handler

    app.add_exception_handler(InvalidTrialSpec, refuse(422))
    app.add_exception_handler(UnknownTrial, refuse(404))
    app.add_exception_handler(StoreUnavailable, refuse(503))
    return app
