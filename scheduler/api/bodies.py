"""Bodies of requests that are read no further than they may be long, and refusals before an application sees them."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.types import Message

DEEPEST = 200
"""Lists and objects within each other; twice what values from objectives may have, which are wrapped."""
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


class Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class BodyLimit:
    """ASGI middleware for an application that strangers may call: nothing longer than ``limit`` bytes reaches it."""

    def __init__(self, app: Any, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_json(receive, self._limit)
        except Refused as error:
            await refuse(send, error, close=True)
            return
        await self._app(scope, replayed(body, receive), send)


async def read_json(receive: Any, limit: int) -> bytes:
    """Read a request's body; raise Refused for more than ``limit`` bytes, and for JSON that is nested too deep."""
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the request ended early")
        total += len(message.get("body", b""))
        if total > limit:
            raise Refused(413, f"the request is larger than {limit / 1024**2:.0f} MiB, the limit of this route")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    if nested_deeper(body, DEEPEST):
        raise Refused(422, f"the request is nested more than {DEEPEST} deep; flatten it")
    return body


def nested_deeper(body: bytes, most: int) -> bool:
    """Tell whether lists and objects are nested more than ``most`` deep in a JSON body."""
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    depth = 0
    for bracket in _BRACKETS.finditer(_TEXTS.sub(b"", body)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > most:
            return True
    return False


def replayed(body: bytes, receive: Any) -> Any:
    """Return a ``receive`` that gives the body at once, and then the connection's end as the server tells it."""
    was_given = False

    async def replaying() -> Message:
        nonlocal was_given
        if was_given:
            message: Message = await receive()
            return message
        was_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


def counted(receive: Any, limit: int) -> Any:
    total = 0

    async def counting() -> Message:
        nonlocal total
        message: Message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise Refused(413, f"the package is larger than {limit / 1024**2:.0f} MiB")
        return message

    return counting


async def refuse(send: Any, error: Refused, *, close: bool) -> None:
    content = json.dumps({"detail": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
