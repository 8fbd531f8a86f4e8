"""The `elastune` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from dist_core.version import __version__
from scheduler.cli.connecting import opened
from scheduler.cli.looking import list_trials, logs, show, timeline, top, why
from scheduler.cli.running import operator, up
from scheduler.cli.simulating import simulate
from scheduler.cli.steering import set_terms, stop, token
from scheduler.errors import SchedulerError
from trials.errors import TrialsError
from trials.plain_words import printable

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Elastic hyperparameter tuning on shared GPUs.")
_COMMANDS: dict[str, Callable[..., None]] = {
    "up": up,
    "operator": operator,
    "ls": list_trials,
    "top": top,
    "show": show,
    "why": why,
    "logs": logs,
    "stop": stop,
    "set": set_terms,
    "token": token,
    "timeline": timeline,
    "simulate": simulate,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def _tell_version() -> None:
    print(f"elastune {__version__}")
    raise typer.Exit


@app.callback()
def _elastune(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda wanted: _tell_version() if wanted else None)
    ] = False,
) -> None:
    pass


def _add_front_ends() -> None:
    """Commands that other packages bring along, such as those of tuner_bridge for NNI."""
    for entry in entry_points(group="elastune.commands"):
        app.add_typer(entry.load(), name=entry.name)


def main() -> Any:
    try:
        _add_front_ends()
        return app()
    except (SchedulerError, TrialsError, ValueError) as error:
        print(f"elastune: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        opened.close()
