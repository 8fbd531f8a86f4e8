"""Callers, and whether what a caller's token opens is enough."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from scheduler.api.tokens import Access, Identity


async def calling_client(request: Request) -> Identity:
    """Return the calling client (a tuner, the command line, a dashboard), as the gate has found out.

    It runs in no thread of its own, because it waits for nothing.
    """
    return identity_of(request)


def identity_of(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


Client = Annotated[Identity, Depends(calling_client)]


def allow(client: Identity, *, study: str | None = None, read: bool = False) -> None:
    """Refuse unless the client is the owner, belongs to ``study``, or only reads where ``read`` says that it may."""
    mine = client.access is Access.STUDY and study is not None and client.subject == study
    if client.access is Access.OWNER or mine or (read and client.access is Access.READ):
        return
    if client.access is Access.READ:
        raise HTTPException(403, "this token is only for reading metrics, overviews and decisions")
    if study is None:
        raise HTTPException(403, f"this token is only for study {client.subject!r}; use the owner's token")
    raise HTTPException(403, f"this token is for study {client.subject!r}, not for {study!r}")
