"""`elastune run -- python tune.py`: a program of Python's whose studies are swept by elastic trials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tuner_bridge.errors import InvalidSweep


@click.command("run")
@click.argument("command", nargs=-1, required=True, metavar="-- python FILE...")
@click.option("--min-replicas", type=int, help="Fewest replicas of a trial.")
@click.option("--max-replicas", type=int, help="Most replicas of a trial; default: all slots.")
@click.option("--slots", type=int, help="Number of slots; default: one per GPU, else one per CPU core.")
@click.option("--emulate", help='Devices to emulate, such as "4x8:resnet50-imagenet@10".')
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder for logs, checkpoints and the database.")
@click.option("--show-output", is_flag=True, help="Print the trials' output here too.")
def run(command: tuple[str, ...], **values: Any) -> None:
    """Run a Python program whose Optuna trials become elastic: elastune run -- python tune.py."""
    from tuner_bridge.in_replica.scripts import is_another_python, program_of, starts_python
    from tuner_bridge.optuna.studies import elastune_studies

    program = None
    if starts_python(command[0]) and not is_another_python(command[0]):
        program = program_of(command[1:], os.getcwd())
    if program is None:
        raise InvalidSweep(
            f"the command is {' '.join(command)!r}; it must be a program of this environment's Python: python FILE, "
            "python -m MODULE or python -c CODE"
        )
    options = {name: value for name, value in values.items() if value not in (None, False)}
    with elastune_studies(**options):
        program.run_here()
