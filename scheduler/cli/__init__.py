"""The `elastune` command. What a command needs is loaded when it runs: help and short answers come at once."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from dist_core.version import __version__
from scheduler.cli.connecting import opened
from scheduler.errors import SchedulerError
from trials.errors import TrialsError
from trials.plain_words import printable

INTERRUPTED = 130
SHELLS = ("bash", "zsh", "fish")
COMMANDS = {
    "up": "running",
    "down": "running",
    "page": "looking",
    "ls": "looking",
    "studies": "looking",
    "nodes": "looking",
    "top": "looking",
    "show": "looking",
    "why": "looking",
    "logs": "looking",
    "stop": "steering",
    "pause": "steering",
    "resume": "steering",
    "retry": "steering",
    "clone": "steering",
    "extend": "steering",
    "fork": "steering",
    "set": "steering",
    "rm": "keeping",
    "export": "keeping",
    "report": "keeping",
    "timeline": "looking",
    "simulate": "simulating",
    "token": "steering",
    "doctor": "doctor",
    "completion": "",
    "operator": "running",
}
"""Modules of the commands, in the order in which help lists these."""


class Commands(click.Group):
    """Knows its commands by name, and those that other packages bring along; loads the one that is meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(entry.name for entry in _others())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return _command(cmd_name)
        entry = next((entry for entry in _others() if entry.name == cmd_name), None)
        if entry is None:
            return None
        command: click.Command = entry.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])


def _command(name: str) -> click.Command:
    if name == completion.name:
        return completion
    loaded = vars(import_module(f"scheduler.cli.{COMMANDS[name]}")).values()
    return next(each for each in loaded if isinstance(each, click.Command) and each.name == name)


def _others() -> Any:
    """Front ends' commands, such as those of tuner_bridge."""
    from importlib.metadata import entry_points

    return entry_points(group="elastune.commands")


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="elastune", message="%(prog)s %(version)s")
def command_line() -> None:
    """Elastic hyperparameter tuning on shared GPUs."""


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    For bash: elastune completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(command_line, {}, "elastune", "_ELASTUNE_COMPLETE").source())


def main() -> Any:
    try:
        return command_line.main(prog_name="elastune", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show(sys.stdout)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        # Whoever read has seen enough.
        sys.stderr.close()
        return 0
    except (SchedulerError, TrialsError, ValueError, OSError) as error:
        print(f"elastune: {printable(str(error))}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    finally:
        opened.close()
