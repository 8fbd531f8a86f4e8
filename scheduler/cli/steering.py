"""Commands that change what runs."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from scheduler.cli.connecting import StateDir, client_of, study_name_of, trial_id_of
from scheduler.errors import SchedulerError
from trials.plain_words import printable
from trials.terms import GOALS


def stop(trial: str, state_dir: StateDir = None) -> None:
    """Cancel a trial."""
    client = client_of(state_dir)
    body = {"why": "cancelled with `elastune stop`"}
    client.request("POST", f"/trials/{trial_id_of(client, trial)}/cancel", body)


def set_terms(
    study: Annotated[str, typer.Argument(help="Name of the study, or how it begins.")],
    weight: Annotated[float | None, typer.Option(help="Share of the slots relative to other studies.")] = None,
    priority: Annotated[int | None, typer.Option(help="Studies with a higher one come first.")] = None,
    yields_to: Annotated[list[str] | None, typer.Option(help="Study that comes first whatever its priority.")] = None,
    quota: Annotated[int | None, typer.Option(help="Most slots at once; 0: no limit.")] = None,
    goal: Annotated[str | None, typer.Option(help=f"One of {', '.join(GOALS)}.")] = None,
    deadline_in: Annotated[float | None, typer.Option(help="Minutes until its best result is wanted.")] = None,
    budget: Annotated[float | None, typer.Option(help="Slot-hours that it may use in all; 0: no limit.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Change a study's share, its place among others, or what its slots are to achieve; also while it runs."""
    client = client_of(state_dir)
    name = study_name_of(client, study)
    changes: dict[str, Any] = {
        "weight": weight,
        "priority": priority,
        "yields_to": yields_to,
        "goal": goal,
        "quota": quota,
        "budget_slot_hours": budget,
        "deadline_at": None if deadline_in is None else time.time() + 60.0 * deadline_in,
    }
    named = {name: value for name, value in changes.items() if value is not None}
    named.update({name: None for name in ("quota", "budget_slot_hours") if named.get(name) == 0})
    answer = client.request("PATCH", f"/studies/{quote(name)}", named)
    for term, value in answer["terms"].items():
        typer.echo(f"{term}: {value}")
    for warning in answer["warnings"]:
        typer.echo(f"elastune: {printable(warning)}", err=True)


def token(
    study: Annotated[str | None, typer.Argument(help="Study that the token is to be for.")] = None,
    read: Annotated[bool, typer.Option("--read", help="For reading metrics, overviews and decisions only.")] = False,
    replace: Annotated[
        bool, typer.Option(help="Make a new one and refuse the old one from now on; without --read or a study: yours.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Print a token that opens one study, or one that only reads; or replace a token."""
    if study is not None and read:
        raise SchedulerError("a token is for one study or for reading; leave out STUDY or --read")
    client = client_of(state_dir)
    access = "read" if read else "owner" if study is None else "study"
    if access == "owner" and not replace:
        typer.echo(client.token)
        return
    body = {"access": access, "study": study or "", "replace": replace}
    typer.echo(client.request("POST", "/tokens", body)["token"])
