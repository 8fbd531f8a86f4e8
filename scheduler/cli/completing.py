"""`elastune completion SHELL`: for bash, zsh and fish."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a shell's completion script.

    For bash: elastune completion bash >> ~/.bashrc
    """
    from scheduler.cli import command_line

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(command_line, {}, "elastune", "_ELASTUNE_COMPLETE").source())
