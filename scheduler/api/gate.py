"""What every request passes before anything of its body is read: who calls, how much, how deep, how often.

Strangers are refused by the head of their request alone and are not kept connected. Others may send as much as the
route needs and no more, and JSON that is nested so deep that reading or repeating it would be dear is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from scheduler.api.connections import EXTENSION
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity
from scheduler.packages import LARGEST_BYTES as LARGEST_PACKAGE

Message = dict[str, Any]

SMALL_BYTES = 1024**2
LARGE_BYTES = 32 * 1024**2
LARGE = re.compile(r"^(/trials|/replica/(outcome|call)|/studies/[^/]+/(answers|news))$")
"""What carries a trial's arguments, results and arrays."""
DEEPEST = 200
"""Lists and objects within each other; twice what values from objectives may have, which are wrapped."""
REQUESTS_A_SECOND = 200.0
"""Of one replica, in the long run; more of them wait."""
BURST = 400.0
LONGEST_DELAY_SECONDS = 5.0
MOST_REPLICAS = 8192
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


@dataclass(slots=True)
class _Bucket:
    level: float
    seen_at: float


class Rates:
    """How long a caller has to wait, so that in the long run it calls no more often than it may."""

    def __init__(self, a_second: float = REQUESTS_A_SECOND, burst: float = BURST) -> None:
        self._a_second = a_second
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def delay(self, caller: str, now: float) -> float:
        bucket = self._buckets.setdefault(caller, _Bucket(0.0, now))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MOST_REPLICAS:
            self._buckets.popitem(last=False)
        bucket.level = max(0.0, bucket.level - (now - bucket.seen_at) * self._a_second) + 1.0
        bucket.seen_at = now
        return max(0.0, bucket.level - self._burst) / self._a_second


class Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Gate:
    """ASGI middleware."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app = app
        self._service = service
        self._rates = Rates()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity: Identity | None = None
        try:
            identity = self._admit(scope)
            if identity is not None and identity.access is Access.REPLICA:
                delay = self._rates.delay(identity.subject, time.monotonic())
                if delay > LONGEST_DELAY_SECONDS:
                    raise Refused(
                        429, f"replica {identity.subject} calls more than {REQUESTS_A_SECOND:.0f} times a second"
                    )
                await asyncio.sleep(delay)
            if scope["path"].startswith("/packages/"):
                receive = _counted(receive, LARGEST_PACKAGE)
            else:
                receive = _replayed(await _body(scope, receive), receive)
            await self._app(scope, receive, send)
        except Refused as error:
            await _refuse(send, error, close=identity is None or error.status == 413)

    def _admit(self, scope: Message) -> Identity | None:
        """Who calls; None for a question about health, which anybody may ask. Raises Refused."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] == "/healthz":
            if headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers:
                raise Refused(413, "a question about health has no body")
            return None
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(401, "this scheduler needs a token: send 'Authorization: Bearer TOKEN'")
        is_replica = scope["path"].startswith("/replica/")
        replica_id = headers.get(b"x-elastune-replica", "") if is_replica else ""
        identity = self._service.tokens.identify(token, replica_id)
        if identity is None and is_replica:
            raise Refused(403, f"this token is not that of replica {replica_id!r:.200}")
        if identity is None:
            raise Refused(
                401, "the token is not this scheduler's, or was replaced; set ELASTUNE_TOKEN to the present one"
            )
        connection = (scope.get("extensions") or {}).get(EXTENSION)
        if connection is not None:
            connection.trust()
        limit = _limit(scope["path"])
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise Refused(
                413, f"the request has {length:.20} bytes; {limit} is the most that {scope['path']:.100} takes"
            )
        return identity


def _limit(path: str) -> int:
    if path.startswith("/packages/"):
        return LARGEST_PACKAGE
    return LARGE_BYTES if LARGE.match(path) else SMALL_BYTES


async def _body(scope: Message, receive: Any) -> bytes:
    limit = _limit(scope["path"])
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the request ended early")
        total += len(message.get("body", b""))
        if total > limit:
            raise Refused(413, f"the request has more than {limit} bytes, the most that {scope['path']:.100} takes")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    if nested_deeper(body, DEEPEST):
        raise Refused(422, f"the request is nested more than {DEEPEST} deep; flatten it")
    return body


def nested_deeper(body: bytes, most: int) -> bool:
    """Whether lists and objects are within each other more than ``most`` deep, for what is JSON."""
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    depth = 0
    for bracket in _BRACKETS.finditer(_TEXTS.sub(b"", body)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > most:
            return True
    return False


def _replayed(body: bytes, receive: Any) -> Any:
    """A ``receive`` that gives the body at once, and then what the server's own gives: the connection's end."""
    given = False

    async def replaying() -> Message:
        nonlocal given
        if given:
            message: Message = await receive()
            return message
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


def _counted(receive: Any, limit: int) -> Any:
    total = 0

    async def counting() -> Message:
        nonlocal total
        message: Message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise Refused(413, f"the package is larger than {limit} bytes")
        return message

    return counting


async def _refuse(send: Any, error: Refused, *, close: bool) -> None:
    content = json.dumps({"detail": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
