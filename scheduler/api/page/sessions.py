"""Sessions of browsers: a link that opens once, or a token typed in, and a cookie from then on.

A link carries its code behind a `#`, which browsers send to nobody; the page hands it over and gets a cookie, which no
script can read and no other site can send. A cookie says what it opens and until when, signed with the scheduler's key:
it outlives a restart, and ends when the token that it stands for is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.api.tokens import Access, Identity, Tokens

SESSION_SECONDS = 30 * 86400.0
LINK_SECONDS = 15 * 60.0
"""Seconds that a requested link is good for; the one that a scheduler prints at its start is good until used."""
MOST_LINKS = 256
"""Most links of one owner that wait to be opened; the oldest go."""


@dataclass(frozen=True, slots=True)
class _Link:
    identity: Identity
    until: float | None
    standing: str
    """Fingerprint of the token that it was made with."""


class Sessions:
    """Callable from any thread."""

    def __init__(self, tokens: Tokens, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._links: OrderedDict[str, _Link] = OrderedDict()

    def link_code(self, identity: Identity, *, lasting: bool = False) -> str:
        """Return a code that opens one session; ``lasting``: however late it is used."""
        code = secrets.token_urlsafe(24)
        until = None if lasting else self._clock() + LINK_SECONDS
        with self._lock:
            mine = [digest for digest, link in self._links.items() if link.identity == identity]
            for digest in mine[: max(0, len(mine) + 1 - MOST_LINKS)]:
                del self._links[digest]
            self._links[_digest(code)] = _Link(identity, until, self._standing(identity))
        return code

    def redeem(self, code: str) -> Identity | None:
        """Whose session the code opens; None for one that is unknown, used or too old."""
        with self._lock:
            link = self._links.pop(_digest(code), None)
        if link is None or (link.until is not None and self._clock() > link.until):
            return None
        # The token that it was made with may have been replaced since.
        return link.identity if hmac.compare_digest(link.standing, self._standing(link.identity)) else None

    def cookie_for(self, identity: Identity) -> str:
        until = int(self._clock() + SESSION_SECONDS)
        subject = base64.urlsafe_b64encode(identity.subject.encode(errors="surrogatepass")).decode().rstrip("=")
        said = f"{identity.access.value}.{subject}.{until}"
        return f"{said}.{self._signature(said, identity)}"

    def identify(self, cookie: str) -> Identity | None:
        """Whose session it is; None for one that is not ours, or not any more."""
        said, _, signature = cookie.rpartition(".")
        access, _, rest = said.partition(".")
        subject, _, until = rest.partition(".")
        try:
            name = base64.urlsafe_b64decode(subject + "=" * (-len(subject) % 4)).decode()
            identity = Identity(Access(access), name)
            expected = self._signature(said, identity)
        except ValueError:
            return None
        equal = hmac.compare_digest(signature.encode(errors="replace"), expected.encode())
        return identity if equal and until.isdigit() and self._clock() <= int(until) else None

    def _signature(self, said: str, identity: Identity) -> str:
        """Sign with the scheduler's key, over the session's token too, so that the session ends with the token."""
        return self._tokens.signed(f"page {said} {self._standing(identity)}")

    def _standing(self, identity: Identity) -> str:
        """Return the fingerprint of the token that opens the same; raises ValueError for what has no page."""
        if identity.access is Access.REPLICA or (identity.subject and identity.access is not Access.STUDY):
            raise ValueError(f"{identity} has no page")
        if identity.access is Access.OWNER:
            token = self._tokens.owner
        elif identity.access is Access.READ:
            token = self._tokens.for_reading()
        else:
            token = self._tokens.for_study(identity.subject)
        return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def cookie_name(host: str) -> str:
    """Return the cookie's name, with the port in it: browsers share a host's cookies among its ports."""
    port = host.rpartition(":")[2]
    return f"elastune_{port if port.isdigit() else 0}"


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode(errors="replace")).hexdigest()
