"""Who may do what: the owner's token opens everything, a replica's token its own trial only.

Replica tokens are derived from the owner's, so that they need no table and survive a restart. Tokens are compared in
constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path


class Tokens:
    def __init__(self, owner: str) -> None:
        if len(owner) < 16:
            raise ValueError(f"the token has {len(owner)} characters; it needs at least 16")
        self.owner = owner

    def for_trial(self, trial_id: str) -> str:
        return hmac.new(self.owner.encode(), f"trial {trial_id}".encode(), hashlib.sha256).hexdigest()

    def is_owner(self, presented: str) -> bool:
        return hmac.compare_digest(presented.encode(), self.owner.encode())

    def is_trial(self, presented: str, trial_id: str) -> bool:
        return hmac.compare_digest(presented.encode(), self.for_trial(trial_id).encode())


def token_in_folder(folder: Path) -> str:
    """The folder's token, made on first use and readable by its owner only."""
    path = folder / "token"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    token = secrets.token_hex(24)
    partial = folder / f"token.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return token
