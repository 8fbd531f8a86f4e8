"""Tokens, and who may do what.

There are five kinds, each opening less than the one before:

the owner's       everything but what replicas say
a study's         its trials and its reports, and the driver's side of it
a reader's        metrics, overviews and decisions; no logs, code or environments
an agent's        what agents of other nodes are told: which replicas to run there
a replica's       its own trial, for as long as it is wanted

All but the owner's are derived from a key that never leaves the scheduler, so that they need no table and survive a
restart. Replacing one counts its version up; whoever has the old one is refused from the next request on. Tokens are
compared in constant time.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from scheduler.errors import RequestRefused

LEAST_CHARACTERS = 16


class Access(enum.Enum):
    OWNER = "owner"
    STUDY = "study"
    READ = "read"
    AGENT = "agent"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Identity:
    access: Access
    subject: str = ""
    """Name of the study, or of the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Secrets that the scheduler keeps to know its tokens again."""

    owner: str
    key: str = ""
    """Key of 32 bytes in hexadecimal; if empty, derived from the owner's token, which cannot be replaced then."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of ``read`` and of ``study NAME``, where they have been replaced."""

    def __post_init__(self) -> None:
        if len(self.owner) < LEAST_CHARACTERS:
            raise ValueError(f"the token has {len(self.owner)} characters; it needs at least {LEAST_CHARACTERS}")

    @property
    def signing_key(self) -> bytes:
        return bytes.fromhex(self.key) or hashlib.sha256(f"key {self.owner}".encode()).digest()


class OthersTokens(Protocol):
    """Tokens of replicas that somebody else gives out."""

    def known(self, token: str, replica_id: str) -> Identity | None:
        """Return whose token it is, without asking anybody."""
        ...

    def ask(self, token: str, replica_id: str) -> Identity | None:
        """May take a while. Raises TrialsError when nobody can tell."""
        ...


class Tokens:
    """Tokens of a scheduler; callable from any thread.

    ``save`` makes the secrets durable before a new token is given out; None: they cannot be kept, and so none is
    replaced.

    ``fixed``: the owner's token was set from outside, where it has to be replaced, too.
    """

    def __init__(
        self, kept: Secrets | str, *, save: Callable[[Secrets], None] | None = None, fixed: bool = False
    ) -> None:
        self._kept = Secrets(owner=kept) if isinstance(kept, str) else kept
        self._save = save
        self._fixed = fixed
        self._lock = threading.Lock()

    @property
    def owner(self) -> str:
        return self._kept.owner

    def for_replica(self, replica_id: str) -> str:
        return self._derived(f"replica {replica_id}")

    def for_study(self, name: str) -> str:
        """Carries the study's name, so that it is known which one is meant."""
        return f"study.{_packed(name)}.{self._derived(f'study {name}')}"

    def for_reading(self) -> str:
        return f"read.{self._derived('read')}"

    def for_agents(self) -> str:
        return self._derived("agents")

    def is_agent(self, presented: str) -> bool:
        return hmac.compare_digest(presented.encode(errors="replace"), self.for_agents().encode())

    def identify(self, presented: str, replica_id: str = "") -> Identity | None:
        """Whose the token is; None if it is nobody's. ``replica_id``: who the caller says it is, if a replica."""
        if presented.startswith("study."):
            name = _unpacked(presented.split(".")[1])
            expected = Identity(Access.STUDY, name or ""), "" if name is None else self.for_study(name)
        elif presented.startswith("read."):
            expected = Identity(Access.READ), self.for_reading()
        elif replica_id:
            expected = Identity(Access.REPLICA, replica_id), self.for_replica(replica_id)
        else:
            expected = Identity(Access.OWNER), self.owner
        identity, token = expected
        equal = hmac.compare_digest(presented.encode(errors="replace"), token.encode())
        return identity if equal and token else None

    def replace(self, access: Access, study: str = "") -> str:
        """Return a new token in the place of one that may have got into wrong hands; durable when it is returned.

        Raises RequestRefused for one that is not this scheduler's to replace.
        """
        with self._lock:
            kept = self._kept
            if access is Access.OWNER:
                if self._fixed or not kept.key:
                    raise RequestRefused(
                        "the owner's token was given to this scheduler when it started; replace it where it is "
                        "set, and restart the scheduler"
                    )
                changed = replace(kept, owner=secrets.token_hex(24))
            elif access in (Access.READ, Access.STUDY):
                what = "read" if access is Access.READ else f"study {study}"
                changed = replace(kept, versions={**kept.versions, what: kept.versions.get(what, 0) + 1})
            elif access is Access.AGENT:
                raise RequestRefused(
                    "the agents' token comes from the scheduler's key and cannot be replaced on its own; start the "
                    "scheduler on a new state folder to change it"
                )
            else:
                raise RequestRefused("a replica's token is valid until the replica ends; stop its trial instead")
            if self._save is None:
                raise RequestRefused(
                    "this scheduler cannot store which tokens were replaced, and would accept the old one again "
                    "after a restart; let it keep its tokens in a secret (--token-secret)"
                )
            self._save(changed)
            self._kept = changed
        return {Access.OWNER: self.owner, Access.READ: self.for_reading()}.get(access) or self.for_study(study)

    def signed(self, text: str) -> str:
        """Return a signature that nobody else can make."""
        message = f"signed {text}".encode(errors="surrogatepass")
        return hmac.new(self._kept.signing_key, message, hashlib.sha256).hexdigest()

    def _derived(self, what: str) -> str:
        kept = self._kept
        message = f"{what} {kept.versions.get(what, 0)}".encode(errors="surrogatepass")
        return hmac.new(kept.signing_key, message, hashlib.sha256).hexdigest()


def _packed(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode(errors="surrogatepass")).decode().rstrip("=")


def _unpacked(packed: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except ValueError:
        return None
