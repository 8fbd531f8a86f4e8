"""Routes for tuners, the command line and dashboards, with the owner's token or a study's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

import scheduler
from scheduler.api.action_routes import action_routes
from scheduler.api.client_access import Client, ClientAccess, allow, calling_client
from scheduler.api.display_routes import display_routes
from scheduler.api.packages import LARGEST_BYTES, PackageRefused
from scheduler.api.page.looking_back import looking_back_routes
from scheduler.api.page.session_routes import session_routes
from scheduler.api.page.sessions import cookie_name
from scheduler.api.page.what_if import what_if_routes
from scheduler.api.row_routes import row_routes
from scheduler.api.service import Service
from scheduler.api.study_routes import study_routes
from scheduler.api.tokens import Access, Identity
from scheduler.api.trial_routes import trial_routes
from scheduler.errors import RequestRefused
from trials.checks import LONGEST_NAME


def client_routes(service: Service) -> APIRouter:
    access = ClientAccess(service.store)
    routes = APIRouter()
    for part in (
        study_routes,
        trial_routes,
        action_routes,
        display_routes,
        row_routes,
        token_routes,
        live_routes,
        looking_back_routes,
    ):
        routes.include_router(part(service, access))
    routes.include_router(package_routes(service))
    routes.include_router(session_routes(service))
    routes.include_router(what_if_routes(service))
    routes.include_router(file_routes())
    return routes


def package_routes(service: Service) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.put("/packages/{digest}")
    async def put_package(client: Client, digest: str, request: Request) -> None:
        """Keep what a sweep sends for its replicas."""
        allow(client, study=client.subject)
        if int(request.headers.get("content-length", "0")) > LARGEST_BYTES:
            raise HTTPException(413, f"the package is larger than {LARGEST_BYTES} bytes")
        try:
            arriving = service.packages.begin(digest)
            try:
                async for part in _large_parts(request.stream()):
                    await asyncio.to_thread(arriving.add, part)
                await asyncio.to_thread(arriving.keep)
            finally:
                arriving.close()
        except PackageRefused as error:
            raise HTTPException(422, str(error)) from error
        except OSError as error:
            raise HTTPException(503, f"the package cannot be stored: {error}") from error

    @routes.get("/packages/{digest}")
    def has_package(client: Client, digest: str) -> dict[str, bool]:
        allow(client, study=client.subject)
        return {"here": service.packages.find(digest) is not None}

    return routes


PART_BYTES = 4 << 20
"""Bytes of a package to write at a time."""


async def _large_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join small parts of an answer into fewer ones: each is written by another thread."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        if len(waiting) >= PART_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


class TokenBody(BaseModel):
    access: str = Field(pattern="^(owner|study|read)$")
    study: str = Field(default="", max_length=LONGEST_NAME)
    replace: bool = False


def token_routes(service: Service, access: ClientAccess) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.get("/whoami")
    def whoami(client: Client) -> dict[str, str]:
        """Return what the caller's token opens."""
        return {"access": client.access.value, "subject": client.subject}

    @routes.get("/openapi.json", include_in_schema=False)
    def openapi(client: Client, request: Request) -> dict[str, Any]:
        """Return this API's description."""
        allow(client, study=client.subject, read=True)
        app: FastAPI = request.app
        return app.openapi()

    @routes.post("/tokens")
    def give_token(client: Client, body: TokenBody) -> dict[str, str]:
        """Return the token of a study or of readers.

        With ``replace``, issue a new one (also of the owner) and revoke the old.
        """
        allow(client)
        kind = Access(body.access)
        study = access.find_study(body.study)
        name = body.study if study is None else study.called
        if kind is Access.STUDY and not name:
            raise HTTPException(422, "the study's name is empty; name the study that the token is for")
        if body.replace:
            try:
                return {"token": service.tokens.replace(kind, name)}
            except RequestRefused as error:
                raise HTTPException(409, str(error)) from error
        if kind is Access.OWNER:
            raise HTTPException(422, "you already have the owner's token: it came with this request")
        return {"token": service.tokens.for_reading() if kind is Access.READ else service.tokens.for_study(name)}

    return routes


RETRY_MILLISECONDS = 1000


def live_routes(service: Service, access: ClientAccess) -> APIRouter:
    routes = APIRouter(prefix="/page", dependencies=[Depends(calling_client)], tags=["page"])

    def may_go_on(request: Request, client: Identity) -> bool:
        """Tell whether the token that opened the stream is still valid: it may have been replaced since."""
        cookie = request.cookies.get(cookie_name(request.headers.get("host", "")))
        token = request.headers.get("authorization", "").partition(" ")[2]
        present = service.tokens.identify(token) if token else service.sessions.identify(cookie or "")
        return present == client

    @routes.get("/events", response_class=EventSourceResponse, include_in_schema=False)
    async def events(request: Request, client: Client) -> AsyncIterator[ServerSentEvent]:
        """Trials, studies and slots as they are, then what changes.

        The last event is ``over``, where the scheduler ends as it should.
        """
        allow(client, study=client.subject, read=True)
        async for told in service.page.follow(service, access, client):
            if not may_go_on(request, client):
                return
            yield ServerSentEvent(raw_data=told, retry=RETRY_MILLISECONDS)
        yield ServerSentEvent(event="over", raw_data="{}")

    return routes


FOLDER = Path(scheduler.__file__).parent / "dashboard" / "page" / "built"
"""Folder in which `make page` puts the page."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors {ancestors}"
)
"""Nothing from elsewhere, and no script or style within the page's text."""
ANCESTORS = "'self' http://localhost:* http://127.0.0.1:*"
"""Origins that may show the page in a frame: notebooks of the browser's own machine."""
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html; charset=utf-8"}
NOT_BUILT = (
    "The page was not built: this is an installation from sources. Run `make page` (it needs Node.js 20), or install a "
    "wheel. Everything else of the scheduler works without it.\n"
)


def file_routes() -> APIRouter:
    routes = APIRouter(tags=["page"], include_in_schema=False)

    @routes.get("/")
    def page() -> Response:
        return _file("index.html", "no-cache")

    @routes.get("/assets/{name}")
    def asset(name: str) -> Response:
        # The name carries a digest of what is in it.
        return _file(f"assets/{name}", "public, max-age=31536000, immutable")

    return routes


def _file(name: str, caching: str) -> Response:
    path = (FOLDER / name).resolve()
    headers = {
        "Content-Security-Policy": POLICY.format(ancestors=ANCESTORS),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": caching,
    }
    if not path.is_relative_to(FOLDER.resolve()) or path.suffix not in TYPES or not path.is_file():
        if name == "index.html":
            return PlainTextResponse(NOT_BUILT, 503, headers=headers)
        return PlainTextResponse("no such file\n", 404, headers=headers)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=headers)
