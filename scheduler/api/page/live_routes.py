"""What a page is told without asking: everything once, then each change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.client_access import ClientAccess
from scheduler.api.page.sessions import cookie_name
from scheduler.api.service import Service
from scheduler.api.tokens import Identity

RETRY_MILLISECONDS = 1000


def live_routes(service: Service, access: ClientAccess) -> APIRouter:
    routes = APIRouter(prefix="/page", dependencies=[Depends(calling_client)], tags=["page"])

    def may_go_on(request: Request, client: Identity) -> bool:
        """Whether what opened the stream still opens it: its token may have been replaced since."""
        cookie = request.cookies.get(cookie_name(request.headers.get("host", "")))
        token = request.headers.get("authorization", "").partition(" ")[2]
        present = service.tokens.identify(token) if token else service.sessions.identify(cookie or "")
        return present == client

    @routes.get("/events", response_class=EventSourceResponse, include_in_schema=False)
    async def events(
        request: Request, client: Client, last_event_id: Annotated[str, Header()] = "", after: str = ""
    ) -> AsyncIterator[ServerSentEvent]:
        """Trials, studies and slots as they are, then what changes; after a break, what was missed.

        The last event is ``over``, where the scheduler ends as it should.
        """
        allow(client, study=client.subject, read=True)
        async for mark, told in service.page.follow(service, access, client, last_event_id or after):
            if not may_go_on(request, client):
                return
            yield ServerSentEvent(raw_data=told, id=mark, retry=RETRY_MILLISECONDS)
        yield ServerSentEvent(event="over", raw_data="{}")

    return routes
