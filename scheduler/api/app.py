"""Assembles the API: both sides, health, and the errors of other packages as HTTP statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from scheduler.api.agent_routes import agent_routes, checkpoint_routes
from scheduler.api.client_access import ClientAccess
from scheduler.api.client_side import client_routes
from scheduler.api.connections import BACKLOG, PatientProtocol, raise_descriptor_limit
from scheduler.api.driver_routes import driver_routes
from scheduler.api.gate import Gate
from scheduler.api.hot_routes import STATUSES, HotFirst, HotRoute, refusal
from scheduler.api.replica_side import replica_routes
from scheduler.api.service import Service
from scheduler.loop.loop_thread import STUCK_SECONDS


def create_app(service: Service) -> ASGIApp:
    """Return the API: outermost the gate, which lets nobody in whom it does not know, and then the hot routes."""
    app, hot = all_routes(service)
    return Gate(HotFirst(app, hot), service)


def all_routes(service: Service) -> tuple[FastAPI, list[HotRoute]]:
    """Return the application, and those of its routes that are answered in front of it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.event_loop = asyncio.get_running_loop()
        if service.over:
            # What is looked at is not to be changed, and replicas that may run are somebody else's.
            yield
            return
        service.loop.start()
        yield
        await asyncio.to_thread(service.loop.stop)

    app = FastAPI(title="Elastune scheduler", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(client_routes(service))
    hot = [*replica_routes(service), *driver_routes(service, ClientAccess(service.store))]
    if service.site.roster is not None:
        app.include_router(agent_routes(service.site.roster, service.loop.log_of))
        app.include_router(checkpoint_routes(service.loop))
    app.router.routes[:0] = hot

    @app.get("/healthz")
    def healthz(response: Response) -> dict[str, str]:
        if service.loop.age > STUCK_SECONDS:
            response.status_code = 503
            return {"status": f"the control loop has not run for {service.loop.age:.0f} s"}
        return {"status": "ok"}

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        return refusal(error)

    for kind in STATUSES:
        app.add_exception_handler(kind, refuse)
    return app, hot


KEEP_ALIVE_SECONDS = 75


def api_config(service: Service, **options: Any) -> uvicorn.Config:
    raise_descriptor_limit()
    # A stranger's broken request is answered; a line for each would fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        create_app(service),
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        **options,
    )
