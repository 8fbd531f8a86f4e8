"""Lookup of a scheduler: by state folder, by name in elastune.toml, by the environment, or this machine's own.

The user's settings, `~/.config/elastune/elastune.toml`, say where schedulers are and how to get in:

    default = "lab"

    [schedulers.lab]
    url = "http://lab.example:7300"
    token_file = "lab.token"

    [schedulers.mine]
    state_dir = "~/.local/state/elastune"

An elastune.toml in the working folder, or in one above it, only chooses among them (`default = "mine"`): it may have
come with somebody else's code, and a scheduler that it named would be sent tokens, code and environments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from scheduler.errors import SchedulerError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "elastune.toml"
KEYS = frozenset({"url", "token_file", "token_env", "state_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    name: str
    url: str = ""
    token: str = ""
    state_dir: Path | None = None


def named_scheduler(
    name: str = "", environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> Named | None:
    """Return the scheduler of that name, or the default of the folder or the settings; None where nothing is chosen.

    Raises SchedulerError for a name that is not there and for a file that cannot be used.
    """
    environ = os.environ if environ is None else environ
    settings = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "elastune" / FILE
    own = _document(settings) if settings.is_file() else {}
    chosen = _chosen(Path.cwd() if folder is None else folder, settings)
    name = name or (chosen[1] if chosen is not None else "") or _default(settings, own)
    if not name:
        return None
    schedulers = own.get("schedulers", {})
    if not isinstance(schedulers, dict) or not isinstance(schedulers.get(name), dict):
        names = ", ".join(sorted(schedulers)) if isinstance(schedulers, dict) and schedulers else "none"
        asked = f" (which {chosen[0]} asks for)" if chosen is not None and chosen[1] == name else ""
        raise SchedulerError(f"your settings ({settings}) have no scheduler {name!r}{asked}; there are: {names}")
    _check_owner(settings)
    return _read(settings, name, schedulers[name], environ)


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SchedulerError(f"{path} cannot be read: {error}") from error


def _default(path: Path, document: Mapping[str, Any]) -> str:
    found = document.get("default", "")
    if not isinstance(found, str):
        raise SchedulerError(f"{path}: default is {found!r}; it must be the name of a scheduler")
    return found


def _chosen(folder: Path, settings: Path) -> tuple[Path, str] | None:
    """Return the file and the scheduler that the working folder, or the nearest one above it, asks for."""
    for each in (folder, *folder.parents):
        path = each / FILE
        if path.is_file() and path != settings:
            document = _document(path)
            unknown = set(document) - {"default"}
            if unknown:
                raise SchedulerError(
                    f"{path} has {min(unknown)!r}; in a project folder it may only choose a scheduler: default = "
                    f"'NAME'. Define schedulers in your own settings, {settings}"
                )
            return path, _default(path, document)
    return None


def _check_owner(path: Path) -> None:
    """Refuse a file of another owner: whoever can write it has one's code sent anywhere."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise SchedulerError(f"{path} belongs to another user, who could send your sweeps anywhere; make your own")
    if status.st_mode & 0o022:
        raise SchedulerError(
            f"{path} can be written by others, who could send your sweeps anywhere; run chmod 600 {path}"
        )


def _read(path: Path, name: str, settings: Mapping[str, Any], environ: Mapping[str, str]) -> Named:
    unknown = set(settings) - KEYS
    if unknown or not all(isinstance(value, str) for value in settings.values()):
        what = f"has no {min(unknown)!r}" if unknown else "takes only strings"
        raise SchedulerError(f"{path}: a scheduler {what}; [schedulers.{name}] may have {', '.join(sorted(KEYS))}")
    if ("url" in settings) == ("state_dir" in settings):
        raise SchedulerError(f"{path}: [schedulers.{name}] needs either a url or a state_dir")
    if "state_dir" in settings:
        return Named(name=name, state_dir=_path(path, settings["state_dir"]))
    token = ""
    if "token_env" in settings:
        token = environ.get(settings["token_env"], "")
    elif "token_file" in settings:
        try:
            token = _path(path, settings["token_file"]).read_text().strip()
        except OSError as error:
            raise SchedulerError(f"{path}: the token of {name!r} cannot be read: {error}") from error
    if not token:
        raise SchedulerError(
            f"{path}: no token is known for {name!r}; give a token_file, or a token_env whose variable is set"
        )
    return Named(name=name, url=settings["url"], token=token)


def _path(file: Path, text: str) -> Path:
    """Return a path as it is meant in the file: relative to its folder."""
    path = Path(text).expanduser()
    return path if path.is_absolute() else file.parent / path


def default_state_dir() -> Path:
    """Return the folder in which `elastune up` keeps its state: $ELASTUNE_HOME, or the user's state folder."""
    home = os.environ.get("ELASTUNE_HOME")
    return Path(home) if home else platformdirs.user_state_path("elastune")
