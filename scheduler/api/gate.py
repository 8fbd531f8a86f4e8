"""Checks of every request before its body is read: who calls, how much, how deep, how often.

Who calls is found out here alone; handlers find it as ``request.state.identity``.

Strangers are refused by the head of their request alone and are not kept connected. Others may send as much as the
route needs and no more, and JSON that is nested so deep that reading or repeating it would be dear is refused.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from scheduler.api.bodies import Refused, counted, read_json, refuse, replayed
from scheduler.api.connections import EXTENSION
from scheduler.api.packages import LARGEST_BYTES as LARGEST_PACKAGE
from scheduler.api.page.sessions import cookie_name
from scheduler.api.service import Service
from scheduler.api.tokens import Access, Identity, OthersTokens
from trials.errors import TrialsError

SMALL_BYTES = 1024**2
LARGE_BYTES = 32 * 1024**2
OPEN = re.compile(r"^(/|/healthz|/assets/[\w.-]+)$")
"""Paths open to anybody: whether the scheduler works, and the page's files, which hold nobody's data."""
AGENTS = "/agents/"
"""Prefix of the routes that agents alone may call."""
CHECKPOINTS = "/agents/checkpoints/"
LARGEST_CHECKPOINT = 256 * 1024**3
"""Largest checkpoint, in bytes. It is streamed to disk, and refused when the disk is full."""
READING = ("GET", "HEAD")
OVER = ("/page/session", "/page/links")
"""Routes open beside reading where nothing runs any more."""
LARGEST_SESSION_BYTES = 8192
PAGE_HEADER = b"x-elastune-page"
LARGE = re.compile(r"^(/trials|/agents/(turn|logs)|/replica/(outcome|call)|/studies/[^/]+/(answers|news))$")
"""Routes that carry a trial's arguments, results and arrays."""
REQUESTS_A_SECOND = 200.0
"""Requests a second of one replica, in the long run; more of them wait."""
BURST = 400.0
LONGEST_DELAY_SECONDS = 5.0
MOST_REPLICAS = 8192


@dataclass(slots=True)
class _Bucket:
    level: float
    seen_at: float


class Rates:
    """Waiting times by caller, so that in the long run none calls more often than it may."""

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
            identity = await self._admit(scope)
            scope.setdefault("state", {})["identity"] = identity
            if identity is not None and identity.access is Access.REPLICA:
                delay = self._rates.delay(identity.subject, time.monotonic())
                if delay > LONGEST_DELAY_SECONDS:
                    raise Refused(
                        429, f"replica {identity.subject} sends more than {REQUESTS_A_SECOND:.0f} requests per second"
                    )
                await asyncio.sleep(delay)
            if self._service.over and scope["method"] not in READING and scope["path"] not in OVER:
                raise Refused(409, self._service.over)
            if scope["path"].startswith("/packages/"):
                receive = counted(receive, LARGEST_PACKAGE)
            elif scope["path"].startswith(CHECKPOINTS):
                receive = counted(receive, LARGEST_CHECKPOINT)
            else:
                receive = replayed(await read_json(receive, _limit(scope["path"])), receive)
            await self._app(scope, receive, send)
        except Refused as error:
            await refuse(send, error, close=identity is None or error.status == 413)

    def _of_session(self, scope: Message, headers: dict[bytes, str]) -> Identity | None:
        """Whose page it is, by its cookie; None without one. Raises Refused for one that is over."""
        cookie = _cookie(headers.get(b"cookie", ""), cookie_name(headers.get(b"host", "")))
        if cookie is None:
            return None
        _check_page(scope, headers)
        identity = self._service.sessions.identify(cookie)
        if identity is None:
            raise Refused(401, "the page's session has expired; `elastune page` prints a new link")
        connection = (scope.get("extensions") or {}).get(EXTENSION)
        if connection is not None:
            connection.trust()
        return identity

    async def _admit(self, scope: Message) -> Identity | None:
        """Return the caller; None for a question about health, which anybody may ask. Raises Refused."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] in ("GET", "HEAD") and OPEN.match(scope["path"]):
            if headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers:
                raise Refused(413, f"a request for {scope['path']:.100} must not have a body")
            return None
        if scope["path"] == "/page/session":
            _check_page(scope, headers)
            length = headers.get(b"content-length", "0")
            if b"transfer-encoding" in headers or not length.isdigit() or int(length) > LARGEST_SESSION_BYTES:
                raise Refused(413, f"a login request has at most {LARGEST_SESSION_BYTES} bytes")
            return None
        if b"authorization" not in headers and not scope["path"].startswith(AGENTS):
            session = self._of_session(scope, headers)
            if session is not None:
                return session
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(401, "this scheduler needs a token: send 'Authorization: Bearer TOKEN'")
        is_replica = scope["path"].startswith("/replica/")
        replica_id = headers.get(b"x-elastune-replica", "") if is_replica else ""
        is_agent = scope["path"].startswith(AGENTS)
        if is_agent:
            identity = Identity(Access.AGENT) if self._service.tokens.is_agent(token) else None
        else:
            identity = self._service.tokens.identify(token, replica_id)
        if identity is None and replica_id and self._service.site.others_tokens is not None:
            identity = await _of_others(self._service.site.others_tokens, token, replica_id)
        if identity is None and is_agent:
            raise Refused(
                403,
                "this token does not belong to an agent of this scheduler; agents are started by the scheduler itself",
            )
        if identity is None and is_replica:
            raise Refused(403, f"this token does not belong to replica {replica_id!r:.200}")
        if identity is None:
            raise Refused(
                401, "the token is not this scheduler's, or was replaced; set ELASTUNE_TOKEN to the current one"
            )
        connection = (scope.get("extensions") or {}).get(EXTENSION)
        if connection is not None:
            connection.trust()
        limit = _limit(scope["path"])
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise Refused(413, f"the request has {length:.20} bytes; {scope['path']:.100} takes at most {limit}")
        return identity


def _cookie(header: str, wanted: str) -> str | None:
    """Return the cookie of that name, among those of this host's other servers: browsers tell no ports apart."""
    for each in header.split(";"):
        name, equals, value = each.strip().partition("=")
        if equals and name == wanted:
            return value.strip('"')
    return None


def _check_page(scope: Message, headers: dict[bytes, str]) -> None:
    """Raise Refused for a request that another site has a browser send.

    It cannot name this header, nor look like this one.
    """
    if scope["method"] not in ("GET", "HEAD") and PAGE_HEADER not in headers:
        raise Refused(
            403, "a request that a cookie authorises needs the header 'X-Elastune-Page'; one with a token does not"
        )
    origin = headers.get(b"origin", "")
    if origin and origin.partition("://")[2] != headers.get(b"host", ""):
        raise Refused(
            403,
            f"a page from {origin:.100} may not call this scheduler; a proxy in front of it has to pass the browser's "
            "host on (nginx: proxy_set_header Host $http_host)",
        )


async def _of_others(tokens: OthersTokens, token: str, replica_id: str) -> Identity | None:
    """Return whose token it is, as others know it; raise Refused when nobody can tell."""
    identity = tokens.known(token, replica_id)
    if identity is not None:
        return identity
    try:
        return await asyncio.to_thread(tokens.ask, token, replica_id)
    except TrialsError as error:
        # The replica asks again.
        raise Refused(503, "the token cannot be checked at the moment; try again") from error


def _limit(path: str) -> int:
    if path.startswith("/packages/"):
        return LARGEST_PACKAGE
    return LARGE_BYTES if LARGE.match(path) else SMALL_BYTES
