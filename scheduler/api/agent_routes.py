"""Routes for agents of other nodes: they say all that they know, and are told all that they are to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Base64Bytes, BaseModel, Field, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from scheduler.api.client_access import Client
from scheduler.api.tokens import Access
from scheduler.loop.control_loop import ControlLoop
from trials.agents.archives import NAME, newest, packed, unpack
from trials.agents.roster import Roster
from trials.agents.words import News
from trials.log_files import LARGEST_LOG_BYTES, open_own

LONGEST_WAIT_SECONDS = 30.0

MOST_LOGS = 10_000

_NEWS = TypeAdapter(News)


class LogPart(BaseModel):
    replica: str = Field(max_length=256)
    at: int = Field(ge=0)
    """The byte of the replica's log that it begins with."""
    part: Base64Bytes


def agent_routes(roster: Roster, log_of: Callable[[str], Path | None]) -> APIRouter:
    routes = APIRouter(tags=["agents"])
    arrived: dict[str, int] = {}
    """Bytes of each replica's log that have come since this process began, with what was there."""
    bell = _Bell()
    roster.on_orders = bell.ring

    @routes.post("/agents/turn")
    async def turn(
        client: Client,
        request: Request,
        document: dict[str, Any],
        heard: Annotated[int, Query(ge=0)] = 0,
        wait: Annotated[float, Query(ge=0.0, le=LONGEST_WAIT_SECONDS)] = 0.0,
    ) -> dict[str, Any]:
        """Hear an agent; answer when it has something to do beyond what it has ``heard``, or after ``wait`` s."""
        if client.access is not Access.AGENT:
            raise HTTPException(403, "only agents may call this")
        try:
            news = _NEWS.validate_python(document)
        except ValidationError as error:
            raise HTTPException(422, str(error)) from error
        roster.hear(news)
        since = time.monotonic()
        if wait > 0.0 and roster.version(news.agent) == heard:
            hung_up = asyncio.ensure_future(_hung_up(request))
            try:
                await bell.wait(news.agent, lambda: roster.version(news.agent) != heard, wait, hung_up)
            finally:
                if hung_up.done():
                    roster.note_hung_up(news.agent, since)
                hung_up.cancel()
        return asdict(roster.orders(news.agent))

    @routes.post("/agents/logs")
    def logs(client: Client, body: LogPart) -> dict[str, int]:
        """Keep a part of what a replica has printed; how many bytes are there then, from which to go on."""
        if client.access is not Access.AGENT:
            raise HTTPException(403, "only agents may call this")
        log = log_of(body.replica)
        if log is None:
            # Nobody will ask for it any more.
            return {"have": body.at + len(body.part)}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open_own(log, os.O_RDWR | os.O_CREAT) as file:
                size = file.seek(0, os.SEEK_END)
                # One that has grown too large is cut meanwhile; what has come is counted on.
                # Since an earlier life of this process, perhaps: what is left is half of the largest at least.
                is_cut = body.at > size > LARGEST_LOG_BYTES // 4
                have = arrived.setdefault(body.replica, body.at if is_cut else size)
                if body.at == have:
                    file.write(body.part)
                    have = arrived[body.replica] = have + len(body.part)
        except OSError as error:
            raise HTTPException(503, f"the log cannot be stored: {error}") from error
        while len(arrived) > MOST_LOGS:
            del arrived[next(iter(arrived))]
        return {"have": have}

    return routes


class _Bell:
    """Wakes those who wait for an agent's orders; rung from any thread."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

    def ring(self, agent: str) -> None:
        waiting = self._events.get(agent)
        if waiting is not None and not waiting[0].is_closed():
            waiting[0].call_soon_threadsafe(waiting[1].set)

    async def wait(self, agent: str, rung: Callable[[], bool], seconds: float, hung_up: asyncio.Future[None]) -> None:
        """Wait until it rings, or nobody is there any more to hear it."""
        event = asyncio.Event()
        self._events[agent] = asyncio.get_running_loop(), event
        # Orders may have come before there was anybody to wake.
        if not rung():
            ringing = asyncio.ensure_future(event.wait())
            either: set[asyncio.Future[Any]] = {ringing, hung_up}
            try:
                await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                # The server stops, and agents ask again.
                raise HTTPException(503, "this scheduler is shutting down") from error
            finally:
                ringing.cancel()
        if self._events.get(agent, (None, None))[1] is event:
            del self._events[agent]


async def _hung_up(request: Request) -> None:
    """Wait until the caller closes the connection; its kernel does so, too, when it is killed."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def checkpoint_routes(loop: ControlLoop) -> APIRouter:
    routes = APIRouter(tags=["agents"], prefix="/agents/checkpoints")

    @routes.put("/{trial}/{name:path}")
    async def put(client: Client, request: Request, trial: str, name: str) -> dict[str, bool]:
        """Keep it, which comes as a tar; one that nobody wants is let go."""
        folder = _folder_of(client, loop, trial, name)
        if folder is None:
            return {"kept": False}
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            descriptor, path = await asyncio.to_thread(tempfile.mkstemp, dir=folder, prefix="arriving-")
            archive = Path(path)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    async for part in request.stream():
                        await asyncio.to_thread(file.write, part)
                await asyncio.to_thread(unpack, archive, folder / name)
            finally:
                archive.unlink(missing_ok=True)
        except ClientDisconnect as error:
            raise HTTPException(400, "the upload of the checkpoint ended early") from error
        except tarfile.TarError as error:
            raise HTTPException(422, f"the checkpoint cannot be unpacked: {error}") from error
        except OSError as error:
            raise HTTPException(
                503, f"the checkpoint of trial {trial} cannot be stored in {folder}: {error}"
            ) from error
        if loop.checkpoints_of(trial) is None:
            # The trial ended meanwhile, and what it had saved has been removed.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return {"kept": True}

    @routes.get("/{trial}")
    def names(client: Client, trial: str) -> list[str]:
        """Return the checkpoints a trial starts from; none while it trains, for then others hand its state on."""
        folder = _folder_of(client, loop, trial, "")
        if folder is None or loop.trains(trial):
            return []
        return sorted(newest(folder).values())

    @routes.get("/{trial}/{name:path}")
    def get(client: Client, trial: str, name: str) -> StreamingResponse:
        folder = _folder_of(client, loop, trial, name)
        if folder is None or not (folder / name).is_dir():
            raise HTTPException(404, f"trial {trial!r:.80} has no checkpoint {name!r:.80} here")
        return StreamingResponse(packed(folder / name), media_type="application/x-tar")

    return routes


def _folder_of(client: Client, loop: ControlLoop, trial: str, name: str) -> Path | None:
    if client.access is not Access.AGENT:
        raise HTTPException(403, "only agents may call this")
    if name and not NAME.match(name):
        raise HTTPException(422, f"{name!r:.80} is not a valid name of a checkpoint, such as checkpoint-00000012")
    return loop.checkpoints_of(trial)
