"""Tokens: what the caller's opens, new ones, and what can be asked with them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.client_access import ClientAccess
from scheduler.api.service import Service
from scheduler.api.tokens import Access
from scheduler.errors import RequestRefused
from trials.checks import LONGEST_NAME


class TokenBody(BaseModel):
    access: str = Field(pattern="^(owner|study|read)$")
    study: str = Field(default="", max_length=LONGEST_NAME)
    replace: bool = False


def token_routes(service: Service, access: ClientAccess) -> APIRouter:
    routes = APIRouter(dependencies=[Depends(calling_client)], tags=["clients"])

    @routes.get("/whoami")
    def whoami(client: Client) -> dict[str, str]:
        """What the caller's token opens."""
        return {"access": client.access.value, "subject": client.subject}

    @routes.get("/openapi.json", include_in_schema=False)
    def openapi(client: Client, request: Request) -> dict[str, Any]:
        """What this API offers."""
        allow(client, study=client.subject, read=True)
        app: FastAPI = request.app
        return app.openapi()

    @routes.post("/tokens")
    def give_token(client: Client, body: TokenBody) -> dict[str, str]:
        """A study's token or a reader's, or a new one in the place of any."""
        allow(client)
        kind = Access(body.access)
        study = access.find_study(body.study)
        name = body.study if study is None else study.called
        if kind is Access.STUDY and not name:
            raise HTTPException(422, "the study's name is empty; a study's token is for one study")
        if body.replace:
            try:
                return {"token": service.tokens.replace(kind, name)}
            except RequestRefused as error:
                raise HTTPException(409, str(error)) from error
        if kind is Access.OWNER:
            raise HTTPException(422, "the owner's token is the one that you came with")
        return {"token": service.tokens.for_reading() if kind is Access.READ else service.tokens.for_study(name)}

    return routes
