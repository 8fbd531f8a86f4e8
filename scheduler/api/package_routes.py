"""Packed working folders that drivers bring."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, HTTPException, Request

from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.packages import LARGEST_BYTES, PackageRefused
from scheduler.api.service import Service


def package_routes(service: Service) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.put("/packages/{digest}")
    async def put_package(client: Client, digest: str, request: Request) -> None:
        """Keep a packed working folder."""
        allow(client, study=client.subject)
        if service.packages is None:
            raise HTTPException(422, "this scheduler starts replicas where sweeps are started; it takes no packages")
        if int(request.headers.get("content-length", "0")) > LARGEST_BYTES:
            raise HTTPException(413, f"the package is larger than {LARGEST_BYTES} bytes")
        content = await request.body()
        try:
            await asyncio.to_thread(service.packages.put, digest, content)
        except PackageRefused as error:
            raise HTTPException(422, str(error)) from error
        except OSError as error:
            raise HTTPException(503, f"the package cannot be kept: {error}") from error

    @routes.get("/packages/{digest}")
    def has_package(client: Client, digest: str) -> dict[str, bool]:
        allow(client, study=client.subject)
        return {"here": service.packages is not None and service.packages.find(digest) is not None}

    return routes
