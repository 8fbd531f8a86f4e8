"""`elastune submit -- COMMAND`: an elastic job without a tuner."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from scheduler.cli.connecting import client_of, scheduler_name, state_dir
from trials.plain_words import printable
from tuner_bridge.driving.sent_environ import sent_environ, this_user
from tuner_bridge.errors import InvalidSweep

ENTRYPOINT = "tuner_bridge.in_replica.commands:run"
STUDY = "jobs"


@click.command("submit")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option(
    "--replicas", default="1", show_default=True, help="Fewest and most replicas, such as 1:8, or one number."
)
@click.option(
    "--slots-per-replica",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Slots of each replica, for models larger than a slot.",
)
@click.option("--study", default=STUDY, show_default=True, help="Study that the job belongs to.")
@click.option("--env", multiple=True, help="Variable for the job: NAME=VALUE, or NAME to copy it from this shell.")
@click.option("--follow", "-f", is_flag=True, help="Print the job's output until it is over.")
@click.option(
    "--preemptible/--no-preemptible",
    default=True,
    help="Let the scheduler take slots back; otherwise the job keeps them until it ends.",
)
@click.option("--keep-state", is_flag=True, help="Keep the state that the job ends with, for `elastune fork`.")
@state_dir
@scheduler_name
def submit(
    command: tuple[str, ...],
    replicas: str,
    study: str,
    env: tuple[str, ...],
    follow: bool,
    state_dir: Path | None,
    scheduler: str,
    **options: bool | int,
) -> None:
    """Run a command as an elastic job: elastune submit --replicas 1:8 -- python train.py --lr 0.1."""
    least, most = _bounds(replicas)
    client = client_of(state_dir, scheduler)
    spec: dict[str, Any] = {
        **options,
        "study": study,
        "entrypoint": ENTRYPOINT,
        "payload": {"command": command},
        "min_replicas": least,
        "max_replicas": most,
        "working_dir": str(Path.cwd()),
        "python_path": [str(Path.cwd())],
        "preload": ["torch"] if _is_python(command[0]) else [],
        "environ": {**sent_environ(None), **_variables(env)},
        "driven": False,
    }
    # Studies go by their titles, where people have given them one.
    named = [each.name for each in client.studies() if study == each.title]
    spec = _placed(client, {**spec, "study": named[0] if len(named) == 1 else study})
    trial = client.submit({**spec, "user": this_user()})
    click.echo(f"submitted as trial {printable(trial.label)} ({trial.id})", err=follow)
    if follow:
        _follow(client, trial)


def _placed(client: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Send the working folder along, where replicas run elsewhere."""
    elsewhere = client.connection.request("GET", "/where")["runs_elsewhere"]
    if not elsewhere:
        return spec
    from trials.spec import TrialSpec
    from tuner_bridge.driving.sent_code import CodeOnCluster, SentCode

    placed = SentCode(CodeOnCluster.from_environ()).place(TrialSpec.from_json({**spec, "number": 0}), client.connection)
    document = placed.to_json()
    del document["number"]
    return document


def _follow(client: Any, trial: Any) -> None:
    from scheduler.cli.looking import follow_logs

    follow_logs(client, trial, follow=True)
    ended = client.trial(trial.id)
    click.echo(
        f"trial {printable(ended.label)} is over: {ended.state}: {printable(ended.error or ended.why)}", err=True
    )
    if ended.state != "succeeded":
        raise SystemExit(1)


def _bounds(replicas: str) -> tuple[int, int]:
    least, colon, most = replicas.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise InvalidSweep(f"--replicas is {replicas!r}; it must be a number, or two such as 1:8") from None


def _variables(asked: Sequence[str]) -> dict[str, str]:
    variables = {}
    for each in asked:
        name, equals, value = each.partition("=")
        if not equals and name not in os.environ:
            raise InvalidSweep(f"--env names {name!r}, which is not set here; give its value: --env {name}=...")
        variables[name] = value if equals else os.environ[name]
    return variables


def _is_python(word: str) -> bool:
    return Path(word).name.startswith("python") or word.endswith(".py") or word == sys.executable
