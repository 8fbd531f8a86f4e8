"""Checkpoints of trials on nodes that share no files with this scheduler: kept here, for whichever node is next."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from scheduler.api.callers import Client
from scheduler.api.tokens import Access
from scheduler.loop.control_loop import ControlLoop
from trials.agents.archives import NAME, newest, packed, unpack


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
            raise HTTPException(400, "the checkpoint did not come whole") from error
        except tarfile.TarError as error:
            raise HTTPException(422, f"the checkpoint cannot be kept: {error}") from error
        except OSError as error:
            raise HTTPException(503, f"the checkpoint cannot be kept: {error}") from error
        if loop.checkpoints_of(trial) is None:
            # The trial ended meanwhile, and what it had saved has been removed.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return {"kept": True}

    @routes.get("/{trial}")
    def names(client: Client, trial: str) -> list[str]:
        """Those that the trial goes on from when it starts; none while it trains, for then others hand its state on."""
        folder = _folder_of(client, loop, trial, "")
        if folder is None or loop.trains(trial):
            return []
        return sorted(newest(folder).values())

    @routes.get("/{trial}/{name:path}")
    def get(client: Client, trial: str, name: str) -> StreamingResponse:
        folder = _folder_of(client, loop, trial, name)
        if folder is None or not (folder / name).is_dir():
            raise HTTPException(404, f"trial {trial!r:.80} has no {name!r:.80} here")
        return StreamingResponse(packed(folder / name), media_type="application/x-tar")

    return routes


def _folder_of(client: Client, loop: ControlLoop, trial: str, name: str) -> Path | None:
    if client.access is not Access.AGENT:
        raise HTTPException(403, "agents alone call this")
    if name and not NAME.match(name):
        raise HTTPException(422, f"{name!r:.80} is no name of a checkpoint")
    return loop.checkpoints_of(trial)
