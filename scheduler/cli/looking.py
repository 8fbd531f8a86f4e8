"""Commands that look at trials and slots."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from scheduler.cli.connecting import PATH, as_json, client_of, scheduler_name, state_dir
from trials.plain_words import printable

LAST = 40
FOLLOW_SECONDS = 0.4
LATE_SECONDS = 10.0
"""Seconds that a trial's first words may come after its end."""


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


@click.command("ls")
@click.option("--study", help="Only this study's trials.")
@click.option("--state", help="Only trials in this state, or: live, waiting, over (finished).")
@click.option(
    "--last",
    type=click.IntRange(min=0),
    default=LAST,
    show_default=True,
    help="Show at most this many finished trials; 0: all.",
)
@as_json
@state_dir
@scheduler_name
def list_trials(
    study: str | None, state: str | None, last: int, as_json: bool, state_dir: Path | None, scheduler: str
) -> None:
    """List trials with their state and its reason, also of a sweep whose scheduler has ended."""
    from scheduler.client.rows import Trial, row_of

    client = client_of(state_dir, scheduler, also_ended=True)
    asked = {"study": study, "state": state, "last": last or None}
    given = {name: value for name, value in asked.items() if value is not None}
    answer = client.connection.request("GET", "/rows", params=given)
    if as_json:
        _print_json(answer["trials"])
        return
    trials = [row_of(Trial, each) for each in answer["trials"]]
    from scheduler.dashboard.listings import print_trials

    print_trials(trials, answer["now"])
    left_out = answer["over"] - sum(trial.is_over for trial in trials)
    if left_out > 0:
        print(f"and {left_out} more finished trials; --last 0 lists all")
    if answer["emulated"]:
        print(answer["emulated"])


@click.command("studies")
@as_json
@state_dir
@scheduler_name
def studies(as_json: bool, state_dir: Path | None, scheduler: str) -> None:
    """List studies with their trials, slots, slot hours and terms."""
    from scheduler.dashboard.listings import print_studies

    all_studies = client_of(state_dir, scheduler, also_ended=True).studies()
    if as_json:
        _print_json([asdict(study) for study in all_studies])
    else:
        print_studies(all_studies)


@click.command("nodes")
@as_json
@state_dir
@scheduler_name
def nodes(as_json: bool, state_dir: Path | None, scheduler: str) -> None:
    """List nodes with their slots, and how many are in use."""
    from scheduler.dashboard.listings import print_nodes, print_queue

    client = client_of(state_dir, scheduler, also_ended=True)
    all_nodes = client.nodes()
    if as_json:
        _print_json([asdict(node) for node in all_nodes])
        return
    print_nodes(all_nodes)
    print_queue(client.queue(), time.time())


@click.command("top")
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print once and exit.")
@state_dir
@scheduler_name
def top(seconds: float, once: bool, state_dir: Path | None, scheduler: str) -> None:
    """Watch studies, trials and slots live."""
    from scheduler.dashboard.terminal import LiveView, print_view

    client = client_of(state_dir, scheduler).connection
    if once:
        print_view(client.request("GET", "/overview"))
        return
    with LiveView() as view:
        while True:
            view.show(client.request("GET", "/overview"))
            time.sleep(seconds)


@click.command("show")
@click.argument("trial")
@as_json
@state_dir
@scheduler_name
def show(trial: str, as_json: bool, state_dir: Path | None, scheduler: str) -> None:
    """Show a trial's state, its replicas, and what happened to it, when and why."""
    client = client_of(state_dir, scheduler, also_ended=True)
    if as_json:
        _print_json(client.story(trial))
        return
    from scheduler.dashboard.listings import print_trial

    print_trial(client.connection.request("GET", f"/trials/{client.trial(trial).id}"))


@click.command("why")
@click.argument("trial")
@as_json
@state_dir
@scheduler_name
def why(trial: str, as_json: bool, state_dir: Path | None, scheduler: str) -> None:
    """Explain why a trial has its slots: the last decision, its numbers, and earlier changes."""
    client = client_of(state_dir, scheduler, also_ended=True)
    answer = client.connection.request("GET", f"/trials/{client.trial(trial).id}/why")
    if as_json:
        _print_json(answer)
        return
    from scheduler.dashboard.listings import print_why

    print_why(answer)


@click.command("logs")
@click.argument("trial")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the trial is over.")
@click.option(
    "--tail", type=click.IntRange(min=0), help="Number of lines to print from the end of each replica's output."
)
@click.option("--replica", help="Only this replica: its id, or the start or end of its id.")
@state_dir
@scheduler_name
def logs(
    trial: str, follow: bool, tail: int | None, replica: str | None, state_dir: Path | None, scheduler: str
) -> None:
    """Print the output of a trial's replicas, oldest replica first."""
    client = client_of(state_dir, scheduler, also_ended=True)
    found = client.trial(trial)
    follow_logs(client, found, follow=follow, tail=tail, replica=replica)


def follow_logs(client: Any, trial: Any, *, follow: bool, tail: int | None = None, replica: str | None = None) -> None:
    """Print them; with ``follow`` until the trial is over, new replicas included."""
    places: dict[str, int] = {}
    headed = ""
    late_until: float | None = None

    def wanted(name: str) -> bool:
        return replica is None or name.startswith(replica) or name.endswith(replica)

    def tell(name: str, words: str) -> None:
        nonlocal headed
        if name != headed:
            click.echo(f"==> {name} <==")
            headed = name
        click.echo(printable(words), nl=False)

    while True:
        over = client.trial(trial.id).is_over
        for name in [name for name in client.replicas_with_logs(trial) if wanted(name)]:
            words, places[name], _ = client.log_since(trial, name, places.get(name, -1))
            if tail is not None and words:
                words = "".join(words.splitlines(keepends=True)[-tail:]) if tail else ""
            if words:
                tell(name, words)
        tail = None
        if over and late_until is None:
            # What a pod printed comes after its end.
            late_until = time.monotonic() + (0.0 if places else LATE_SECONDS)
        if not follow or (late_until is not None and (places or time.monotonic() > late_until)):
            return
        time.sleep(FOLLOW_SECONDS)


@click.command("timeline")
@click.argument("output", type=PATH)
@state_dir
@scheduler_name
def timeline(output: Path, state_dir: Path | None, scheduler: str) -> None:
    """Draw which trial held which slots over time."""
    from scheduler.dashboard.picture import draw_timeline

    client = client_of(state_dir, scheduler, also_ended=True)
    click.echo(draw_timeline(client.connection.request("GET", "/timeline"), output))


@click.command("page")
@click.option("--read", is_flag=True, help="Print a read-only link.")
@state_dir
@scheduler_name
def page(read: bool, state_dir: Path | None, scheduler: str) -> None:
    """Print a link to the web page; serve the page if the folder's scheduler has ended."""
    from scheduler.client import Client
    from scheduler.errors import NotRunning

    try:
        click.echo(client_of(state_dir, scheduler).page_link(read=read))
    except NotRunning as error:
        from scheduler.host.recorded import recorded

        with recorded(error.folder) as connection:
            click.echo(
                f"{Client(connection).page_link(read=True)}\nthe scheduler has ended; Ctrl-C ends this page", nl=True
            )
            while True:
                time.sleep(3600.0)
