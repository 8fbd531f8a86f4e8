"""Commands that change what runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from scheduler.cli.connecting import client_of, scheduler_name, state_dir
from trials.plain_words import printable
from trials.terms import GOALS


@click.command("stop")
@click.argument("trial", required=False)
@click.option("--study", help="End all unfinished trials of this study.")
@state_dir
@scheduler_name
def stop(trial: str | None, study: str | None, state_dir: Path | None, scheduler: str) -> None:
    """End a trial, or all trials of a study."""
    from scheduler.errors import SchedulerError

    if (trial is None) == (study is None):
        raise SchedulerError("name either a trial to stop, or a study with --study to stop all of its trials")
    client = client_of(state_dir, scheduler)
    why = "cancelled with `elastune stop`"
    if study is not None:
        found = client.trials(study=client.study(study).name, state="live")
        for each in found:
            client.stop(each, why)
        click.echo(f"{len(found)} trial{'s' * (len(found) != 1)} of {printable(study)} told to stop")
        return
    one = client.trial(trial or "")
    if client.stop(one, why):
        click.echo(f"trial {printable(one.label)} was told to stop")
    else:
        click.echo(f"trial {printable(one.label)} had already ended: {one.state}")


@click.command("pause")
@click.argument("trial")
@click.option("--why", default="", help="Reason to show while the trial waits.")
@state_dir
@scheduler_name
def pause(trial: str, why: str, state_dir: Path | None, scheduler: str) -> None:
    """Pause a trial: it saves its state and frees its slots until `elastune resume`."""
    client = client_of(state_dir, scheduler)
    one = client.trial(trial)
    client.pause(one, why)
    click.echo(f"trial {printable(one.label)} pauses; `elastune resume {one.id}` continues it")


@click.command("resume")
@click.argument("trial")
@state_dir
@scheduler_name
def resume(trial: str, state_dir: Path | None, scheduler: str) -> None:
    """Continue a paused trial."""
    client = client_of(state_dir, scheduler)
    one = client.trial(trial)
    client.resume(one)
    click.echo(f"trial {printable(one.label)} continues when it gets slots")


@click.command("retry")
@click.argument("trial")
@state_dir
@scheduler_name
def retry(trial: str, state_dir: Path | None, scheduler: str) -> None:
    """Run a trial again, unchanged, as a new trial."""
    _again(client_of(state_dir, scheduler), trial, {})


@click.command("clone")
@click.argument("trial")
@click.option(
    "--set", "changes", multiple=True, required=True, help="Parameter to change, such as lr=0.1; may be repeated."
)
@state_dir
@scheduler_name
def clone(trial: str, changes: tuple[str, ...], state_dir: Path | None, scheduler: str) -> None:
    """Run a trial again with other parameters, as a new trial."""
    _again(client_of(state_dir, scheduler), trial, _changes(changes))


@click.command("fork")
@click.argument("trial")
@click.option("--set", "changes", multiple=True, help="Parameter to change, such as lr=0.1; may be repeated.")
@state_dir
@scheduler_name
def fork(trial: str, changes: tuple[str, ...], state_dir: Path | None, scheduler: str) -> None:
    """Train on from where a trial stands, as a new trial with other parameters.

    A trial that runs trains on beside its fork. A finished trial needs its state kept: `elastune submit --keep-state`,
    or optimize(..., keep_states=True).
    """
    _again(client_of(state_dir, scheduler), trial, _changes(changes), forks=True)


@click.command("extend")
@click.argument("trial")
@click.argument("epochs", type=click.IntRange(min=1))
@state_dir
@scheduler_name
def extend(trial: str, epochs: int, state_dir: Path | None, scheduler: str) -> None:
    """Train a trial for more epochs, as a new trial that begins with its state.

    EPOCHS is the number of further epochs. A finished trial needs its state kept, as for `elastune fork`.
    """
    client = client_of(state_dir, scheduler)
    one = client.trial(trial)
    _say_what_was_made(client.extend(one, epochs), f"a trial that trains {printable(one.label)} for {epochs} more")


def _changes(changes: tuple[str, ...]) -> dict[str, Any]:
    from scheduler.errors import SchedulerError

    changed: dict[str, Any] = {}
    for each in changes:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SchedulerError(f"--set is {each!r}; it must be NAME=VALUE, such as lr=0.1")
        changed[name] = _read(value)
    return changed


def _again(client: Any, trial: str, changed: dict[str, Any], *, forks: bool = False) -> None:
    one = client.trial(trial)
    made = client.fork(one, **changed) if forks else client.clone(one, **changed)
    kind = "that begins where" if forks else "like"
    _say_what_was_made(made, f"a trial {kind} {printable(one.label)}{' stands' * forks}")


def _say_what_was_made(made: Any, what: str) -> None:
    if made is None:
        click.echo(f"{what} is queued; its sweep runs it next")
    else:
        click.echo(f"submitted as trial {printable(made.label)} ({made.id})")


def _read(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


@click.command("set")
@click.argument("study")
@click.option("--weight", type=float, help="Share of the slots relative to other studies.")
@click.option("--priority", type=int, help="Priority: studies with a higher one come first.")
@click.option("--yields-to", multiple=True, help="Study that always gets slots before this one; may be repeated.")
@click.option("--quota", type=int, help="Most slots at once; 0: no limit.")
@click.option("--goal", help=f"One of {', '.join(GOALS)}.")
@click.option("--deadline-in", type=float, help="Minutes until the best result is wanted; needs --goal deadline.")
@click.option("--budget", type=float, help="Slot hours that the study may use in total; 0: no limit.")
@state_dir
@scheduler_name
def set_terms(
    study: str,
    deadline_in: float | None,
    budget: float | None,
    state_dir: Path | None,
    scheduler: str,
    **others: Any,
) -> None:
    """Change a study's weight, priority, quota, goal or budget, also while it runs."""
    from scheduler.dashboard.lines import clock

    client = client_of(state_dir, scheduler)
    changes: dict[str, Any] = {
        **others,
        "budget_slot_hours": budget,
        "deadline_at": None if deadline_in is None else time.time() + 60.0 * deadline_in,
    }
    named = {name: value for name, value in changes.items() if value is not None}
    named.update({name: None for name in ("quota", "budget_slot_hours") if named.get(name) == 0})
    terms, warnings = client.set_terms(study, **named)
    for term, value in terms.items():
        click.echo(f"{term}: {clock(value) if term == 'deadline_at' and value is not None else value}")
    for warning in warnings:
        click.echo(f"elastune: {printable(warning)}", err=True)


@click.command("token")
@click.argument("study", required=False)
@click.option("--read", is_flag=True, help="Print a token that only reads metrics, overviews and decisions.")
@click.option(
    "--replace/--no-replace",
    default=False,
    help="Make a new token and refuse the old one; without --read or STUDY: the owner's token.",
)
@state_dir
@scheduler_name
def token(study: str | None, read: bool, replace: bool, state_dir: Path | None, scheduler: str) -> None:
    """Print a token for one study or for reading, or replace a token."""
    from scheduler.errors import SchedulerError

    if study is not None and read:
        raise SchedulerError("a token is for one study or for reading; leave out STUDY or --read")
    client = client_of(state_dir, scheduler)
    if study is None and not read and not replace:
        click.echo(client.connection.token)
        return
    access: Any = "read" if read else "owner" if study is None else "study"
    click.echo(client.token(access, study=study or "", replace=replace))
