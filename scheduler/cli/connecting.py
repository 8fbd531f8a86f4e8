"""Choice of the scheduler that a command is about, and options that many commands share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from scheduler.client import Client

PATH = click.Path(path_type=Path)
state_dir = click.option(
    "--state-dir", type=PATH, help="State folder; default: $ELASTUNE_HOME or the user's state folder."
)
scheduler_name = click.option(
    "--scheduler", "scheduler", default="", envvar="ELASTUNE_SCHEDULER", help="Name of a scheduler in elastune.toml."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

opened = ExitStack()
"""Connections that this command has made."""


def client_of(state_dir: Path | None, scheduler: str = "", *, also_ended: bool = False) -> Client:
    """Return the scheduler that the options, ELASTUNE_URL or elastune.toml name, else this user's own.

    ``also_ended``: what an ended one has kept will do.
    """
    from scheduler.client import Client
    from scheduler.errors import NotRunning

    try:
        client = Client.connect(state_dir=state_dir, scheduler=scheduler)
    except NotRunning as error:
        if not also_ended:
            raise
        from scheduler.host.recorded import recorded

        client = Client(opened.enter_context(recorded(error.folder)))
    opened.callback(client.close)
    return client
