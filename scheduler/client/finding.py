"""Which scheduler is meant: by state folder, by name in elastune.toml, by the environment, or this machine's own.

elastune.toml is looked for in the working folder and those above it, then in the user's settings:

    default = "lab"

    [schedulers.lab]
    url = "http://lab.example:7300"
    token_file = "~/.config/elastune/lab.token"

    [schedulers.mine]
    state_dir = "~/.local/state/elastune"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.errors import SchedulerError

FILE = "elastune.toml"
KEYS = frozenset({"url", "token_file", "token_env", "state_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A scheduler that elastune.toml names."""

    name: str
    url: str = ""
    token: str = ""
    state_dir: Path | None = None


def named_scheduler(
    name: str = "", environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> Named | None:
    """Of that name, or the file's default one; None where there is no file, or it has no default.

    Raises SchedulerError for a name that is not there and for a file that cannot be used.
    """
    environ = os.environ if environ is None else environ
    path = _file(environ, Path.cwd() if folder is None else folder)
    if path is None:
        if name:
            raise SchedulerError(
                f"no {FILE} is in this folder, above it, or among your settings; {name!r} is looked for there"
            )
        return None
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SchedulerError(f"{path} cannot be read: {error}") from error
    known = document.get("schedulers", {})
    name = name or document.get("default", "")
    if not name:
        return None
    if not isinstance(known, dict) or not isinstance(known.get(name), dict):
        names = ", ".join(sorted(known)) if isinstance(known, dict) and known else "none"
        raise SchedulerError(f"{path} names no scheduler {name!r}; there are: {names}")
    return _read(path, name, known[name], environ)


def _read(path: Path, name: str, given: Mapping[str, Any], environ: Mapping[str, str]) -> Named:
    unknown = set(given) - KEYS
    if unknown or not all(isinstance(value, str) for value in given.values()):
        what = f"has no {min(unknown)!r}" if unknown else "has texts only"
        raise SchedulerError(f"{path}: a scheduler {what}; [schedulers.{name}] may have {', '.join(sorted(KEYS))}")
    if ("url" in given) == ("state_dir" in given):
        raise SchedulerError(f"{path}: [schedulers.{name}] needs either a url or a state_dir")
    if "state_dir" in given:
        return Named(name=name, state_dir=_path(path, given["state_dir"]))
    token = ""
    if "token_env" in given:
        token = environ.get(given["token_env"], "")
    elif "token_file" in given:
        try:
            token = _path(path, given["token_file"]).read_text().strip()
        except OSError as error:
            raise SchedulerError(f"{path}: the token of {name!r} cannot be read: {error}") from error
    if not token:
        raise SchedulerError(f"{path}: no token is known for {name!r}; give a token_file, or a token_env that is set")
    return Named(name=name, url=given["url"], token=token)


def _path(file: Path, text: str) -> Path:
    """As it is meant in the file."""
    path = Path(text).expanduser()
    return path if path.is_absolute() else file.parent / path


def _file(environ: Mapping[str, str], folder: Path) -> Path | None:
    for each in (folder, *folder.parents):
        if (each / FILE).is_file():
            return each / FILE
    settings = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "elastune" / FILE
    return settings if settings.is_file() else None
