"""The secrets of a scheduler in its state folder: files that nobody but their owner can read.

token          the owner's token, for the command line
tokens.json    the key that all other tokens come from, and which of them were replaced
"""

from __future__ import annotations

import json
import logging
import secrets
import stat
from pathlib import Path

from scheduler.api.tokens import Secrets
from scheduler.state_folder import write_durably
from trials.errors import StoreUnavailable

logger = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private(path: Path) -> None:
    """Take the rights of others away where they have some, and say so; raises StoreUnavailable where it cannot."""
    try:
        mode = path.stat().st_mode
        if not mode & OTHERS:
            return
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailable(
            f"other users of this machine can read {path}, and its permissions cannot be changed ({error}); choose "
            "a folder of your own"
        ) from error
    logger.warning(
        "other users of this machine could read %s (mode %o); now only you can. Whoever has read a token still has "
        "it: replace it with `elastune token --replace`",
        path,
        stat.S_IMODE(mode),
    )


def secrets_in_folder(folder: Path) -> Secrets:
    """Return the folder's secrets, made at first use."""
    for name in ("token", "tokens.json"):
        keep_private(folder / name)
    token = _read(folder / "token")
    kept = _read(folder / "tokens.json")
    if token and kept:
        document = json.loads(kept)
        return Secrets(owner=token, key=document["key"], versions=document["versions"])
    made = Secrets(owner=token or secrets.token_hex(24), key=secrets.token_hex(32))
    save_in_folder(folder, made)
    return made


def save_in_folder(folder: Path, kept: Secrets) -> None:
    """Save the secrets in the folder, durably."""
    document = {"key": kept.key, "versions": dict(kept.versions)}
    write_durably(folder / "tokens.json", json.dumps(document))
    write_durably(folder / "token", kept.owner)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
