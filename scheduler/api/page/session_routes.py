"""Getting in: what a browser calls before it has a session, and to leave; links for those who have a token."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel, Field

from scheduler.api.client_access import Client, allow, calling_client
from scheduler.api.page.sessions import SESSION_SECONDS, cookie_name
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity


class SessionBody(BaseModel):
    code: str = Field(default="", max_length=200)
    """Code from a link."""
    token: str = Field(default="", max_length=4000)
    """The owner's, a study's or a reader's, typed in."""


class LinkBody(BaseModel):
    access: str = Field(default="owner", pattern="^(owner|read)$")


def session_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/page", tags=["page"])

    @routes.post("/session")
    def begin(body: SessionBody, request: Request, response: Response) -> dict[str, str]:
        """Set a cookie for the code of a link, or for a token; return what it may access."""
        identity = service.sessions.redeem(body.code) if body.code else None
        if identity is None and body.token:
            identity = service.tokens.identify(body.token.strip())
            if identity is not None and identity.access is Access.REPLICA:
                identity = None
        if identity is None:
            what = "token is not this scheduler's" if body.token else "link was used already, or is too old"
            raise HTTPException(401, f"the {what}; `elastune page` prints a new link")
        response.set_cookie(
            cookie_name(request.headers.get("host", "")),
            service.sessions.cookie_for(identity),
            max_age=int(SESSION_SECONDS),
            httponly=True,
            samesite="strict",
            secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
        )
        return {"access": identity.access.value}

    @routes.delete("/session")
    def end(request: Request, response: Response) -> None:
        response.delete_cookie(cookie_name(request.headers.get("host", "")), httponly=True, samesite="strict")

    @routes.post("/links", dependencies=[Depends(calling_client)])
    def link(client: Client, body: LinkBody) -> dict[str, Any]:
        """Return the path of a link that opens the page once."""
        identity = client
        if client.access is Access.OWNER and body.access == "read":
            identity = Identity(Access.READ)
        elif client.access is not Access.STUDY:
            allow(client, read=True)
        return {"path": link_path(service.sessions.link_code(identity))}

    return routes


def link_path(code: str) -> str:
    return f"/#code={code}"
