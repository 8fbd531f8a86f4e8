"""Which scheduler, trial and study a command is about."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from scheduler.api.client import SchedulerClient, default_state_dir
from scheduler.errors import SchedulerError, SchedulerUnreachable
from scheduler.state_folder import read_server_file
from trials.plain_words import printable

StateDir = Annotated[
    Path | None, typer.Option(help="State folder; default: $ELASTUNE_HOME or the user's state folder.")
]

opened = ExitStack()
"""Connections that this command has made."""


def client_of(state_dir: Path | None) -> SchedulerClient:
    """The scheduler that ELASTUNE_URL names, else the one that runs on the state folder."""
    client = _find_client(state_dir)
    opened.callback(client.close)
    return client


def _find_client(state_dir: Path | None) -> SchedulerClient:
    if state_dir is None:
        named = SchedulerClient.from_environ()
        if named is not None:
            return named
    folder = state_dir or default_state_dir()
    server = read_server_file(folder)
    if server is None:
        raise SchedulerError(
            f"no scheduler has run on {folder}; start one with `elastune up`, set ELASTUNE_URL, or name the folder of "
            "a sweep's own scheduler with --state-dir"
        )
    client = SchedulerClient(server["url"], (folder / "token").read_text().strip())
    try:
        client.check()
    except SchedulerUnreachable as error:
        client.close()
        raise SchedulerError(
            f"the scheduler of {folder} is not running (it was last at {server['url']}); a sweep's own one ends with "
            "its sweep, another is started with `elastune up --state-dir`"
        ) from error
    return client


def trial_id_of(client: SchedulerClient, wanted: str) -> str:
    """The trial that an id, the beginning of one, or a number within its study stands for."""
    trials = client.request("GET", "/trials")
    found = [trial["trial_id"] for trial in trials if trial["trial_id"] == wanted] or [
        trial["trial_id"] for trial in trials if str(trial["number"]) == wanted or trial["trial_id"].startswith(wanted)
    ]
    if len(found) != 1:
        many = f"{len(found)} trials are" if found else "no trial is"
        raise SchedulerError(f"{many} called {wanted!r}; `elastune ls` lists their ids")
    return str(found[0])


def study_name_of(client: SchedulerClient, wanted: str) -> str:
    """Of the one study that is called so: by its name, its title, or how one of these begins."""
    known: list[tuple[str, str]] = [(each["name"], each["title"]) for each in client.request("GET", "/studies")]
    found = [name for name, title in known if wanted in (name, title)]
    found = found or [name for name, title in known if name.startswith(wanted) or title.startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(sorted(found or (name for name, _ in known))) or "-"
        raise SchedulerError(f"{len(found) or 'no'} studies are called {wanted!r}; there are: {printable(names)}")
    return found[0]
