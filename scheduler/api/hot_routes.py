"""Routes that replicas and drivers call many times a second.

FastAPI looks anew at each request for what its handler depends on, which costs ten times what Starlette's own routes
cost, and leads it through layers that these need nothing of. They are answered in front of those, find their caller and
check their body alike, and answer errors with the same statuses.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trials.errors import InvalidTrialSpec, StoreUnavailable, UnknownTrial

Handler = Callable[..., Any]
"""Handler of a caller, a body or a query where there is one, and the path's parameters; a coroutine, or a function
that may wait for the disk."""


class HotRoute(Route):
    model: type[BaseModel] | None = None
    """Model of what comes with a request: the query of a GET, else the body."""
    answer: Callable[[Request], Awaitable[Response]]
    """Answers a request; raises what the handler does."""


class HotFirst:
    """Middleware that answers requests for these routes, and leaves all others to the app."""

    def __init__(self, app: ASGIApp, routes: Sequence[HotRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self._routes:
                match, path = route.matches(scope)
                if match is Match.FULL:
                    scope.update(path)
                    response = await _answer(route, Request(scope, receive, send))
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def _answer(route: HotRoute, request: Request) -> Response:
    """Return a route's answer, errors of its handler included."""
    try:
        return await route.answer(request)
    except HTTPException as error:
        return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
    except RequestValidationError as error:
        return await request_validation_exception_handler(request, error)
    except tuple(STATUSES) as error:
        return refusal(error)


STATUSES = {InvalidTrialSpec: 422, UnknownTrial: 404, StoreUnavailable: 503}
"""Statuses that errors of other packages are answered with."""


def refusal(error: Exception) -> JSONResponse:
    """Return the answer to an error of another package."""
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return JSONResponse({"detail": str(error)}, status_code=status)


class HotRoutes:
    """Routes of Starlette's own, without FastAPI's search for dependencies.

    ``caller_of`` finds who calls; raises HTTPException for whom the routes are not.
    """

    def __init__(self, caller_of: Callable[[Request], Any], prefix: str = "") -> None:
        self._caller_of = caller_of
        self._prefix = prefix
        self.routes: list[HotRoute] = []

    def get(self, path: str, query: type[BaseModel] | None = None) -> Callable[[Handler], Handler]:
        """Have a handler serve this path. What it returns is answered as JSON, if it is no response itself."""
        return self._serve("GET", path, query)

    def post(self, path: str, body: type[BaseModel] | None = None) -> Callable[[Handler], Handler]:
        return self._serve("POST", path, body)

    def put(self, path: str, body: type[BaseModel] | None = None) -> Callable[[Handler], Handler]:
        return self._serve("PUT", path, body)

    def _serve(self, method: str, path: str, model: type[BaseModel] | None) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                arguments = [self._caller_of(request)]
                if model is not None:
                    arguments.append(await _read(request, model))
                if inspect.iscoroutinefunction(handler):
                    answer = await handler(*arguments, **request.path_params)
                else:
                    answer = await asyncio.to_thread(handler, *arguments, **request.path_params)
                return answer if isinstance(answer, Response) else JSONResponse(answer)

            route = HotRoute(self._prefix + path, endpoint, methods=[method])
            route.model, route.answer = model, endpoint
            self.routes.append(route)
            return handler

        return register


async def _read(request: Request, model: type[BaseModel]) -> BaseModel:
    """Read what comes with a request: of a GET its query, else its body. Raises RequestValidationError."""
    try:
        if request.method == "GET":
            return model.model_validate(dict(request.query_params))
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_context=False, include_url=False)) from error
