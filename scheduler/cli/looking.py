"""Commands that look at trials and slots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from scheduler.api.client import default_state_dir
from scheduler.cli.connecting import StateDir, client_of, trial_id_of
from trials.plain_words import printable


def list_trials(state_dir: StateDir = None) -> None:
    """All trials with their state and the reason for it."""
    from scheduler.dashboard.terminal import print_trials

    print_trials(client_of(state_dir).request("GET", "/overview"))


def top(state_dir: StateDir = None, seconds: Annotated[float, typer.Option(help="Between two looks.")] = 0.5) -> None:
    """Live view of studies, trials and slots."""
    from scheduler.dashboard.terminal import LiveView

    client = client_of(state_dir)
    with LiveView() as view:
        while True:
            view.show(client.request("GET", "/overview"))
            time.sleep(seconds)


def show(trial: str, state_dir: StateDir = None) -> None:
    """One trial: its state, its replicas, and what happened to it when and why."""
    from scheduler.dashboard.terminal import print_trial

    client = client_of(state_dir)
    print_trial(client.request("GET", f"/trials/{trial_id_of(client, trial)}"))


def why(trial: str, state_dir: StateDir = None) -> None:
    """Why a trial has the slots that it has: the last decision, what went into it, and how it changed."""
    from scheduler.dashboard.terminal import print_why

    client = client_of(state_dir)
    print_why(client.request("GET", f"/trials/{trial_id_of(client, trial)}/why"))


def logs(trial: str, state_dir: StateDir = None) -> None:
    """What a trial's replicas printed, oldest replica first."""
    folder = (state_dir or default_state_dir()) / "logs" / trial
    if folder.is_dir():
        # Also those of a scheduler that has ended.
        for path in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime):
            typer.echo(f"==> {path.name} <==")
            typer.echo(printable(path.read_text(errors="replace")), nl=False)
        return
    client = client_of(state_dir)
    for each in client.request("GET", f"/trials/{trial_id_of(client, trial)}/log"):
        typer.echo(f"==> {each['replica_id']} <==")
        typer.echo(printable(each["words"]), nl=False)


def timeline(
    output: Annotated[Path, typer.Argument(help="Base name; writes BASE.png and BASE.html.")],
    state_dir: StateDir = None,
) -> None:
    """Draw who held which slots over time."""
    from scheduler.dashboard.picture import draw_timeline

    for path in draw_timeline(client_of(state_dir).request("GET", "/timeline"), output):
        typer.echo(path)
