"""The `elastune` command. What a command needs is loaded when it runs: help and short answers come at once."""

from __future__ import annotations

import sys
from typing import Any

import click

from dist_core.version import __version__
from scheduler.cli.commands import COMMANDS
from scheduler.cli.connecting import opened
from scheduler.errors import SchedulerError
from trials.errors import TrialsError
from trials.plain_words import printable

INTERRUPTED = 130


class Commands(click.Group):
    """Knows its commands by name, and those that other packages bring along; loads the one that is meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(entry.name for entry in _others())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return COMMANDS[cmd_name].load()
        found = next((entry for entry in _others() if entry.name == cmd_name), None)
        if found is None:
            return None
        command: click.Command = found.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.sentence) for name, command in COMMANDS.items() if not command.hidden]
        rows += [(entry.name, entry.load().get_short_help_str(200)) for entry in _others()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _others() -> Any:
    """Front ends' commands, such as those of tuner_bridge."""
    from importlib.metadata import entry_points

    return entry_points(group="elastune.commands")


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="elastune", message="%(prog)s %(version)s")
def command_line() -> None:
    """Elastic hyperparameter tuning on shared GPUs."""


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
