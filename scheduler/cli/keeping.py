"""Commands about what is kept: exports, accounts, and forgetting."""

from __future__ import annotations

import csv
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from scheduler.cli.connecting import PATH, client_of, scheduler_name, state_dir
from scheduler.errors import SchedulerError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@click.command("rm")
@click.option("--older-than", required=True, help="Time since a trial ended, such as 90s, 20m, 12h, 30d or 2w.")
@click.option("--study", help="Only this study's trials.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@state_dir
@scheduler_name
def remove(older_than: str, study: str | None, yes: bool, state_dir: Path | None, scheduler: str) -> None:
    """Delete trials that ended long ago, with their reports, histories and logs."""
    seconds = _seconds(older_than)
    client = client_of(state_dir, scheduler)
    name = None if study is None else client.study(study).name
    now = time.time()
    driven = {each.name for each in client.studies() if each.driven}
    old = [
        trial.id
        for trial in client.trials(study=name, state="over")
        if now - (trial.finished or now) > seconds and trial.study not in driven
    ]
    if not old:
        click.echo(f"no trial ended more than {older_than} ago (trials of running sweeps are kept)")
        return
    if not yes and not click.confirm(f"delete {len(old)} trials permanently?"):
        click.echo("nothing was deleted")
        return
    click.echo(f"{client.forget(old)} trials will be deleted in the next moments")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is None:
        raise SchedulerError(f"--older-than is {text!r}; it must be a number with s, m, h, d or w, such as 30d")
    return float(found[1]) * UNITS[found[2]]


COLUMNS = (
    ("trial", "id"),
    ("study", "title"),
    ("number", "number"),
    ("state", "state"),
    ("reason", "code"),
    ("value", "value"),
    ("latest", "latest"),
    ("step", "step"),
    ("progress", "progress"),
    ("submitted_at", "submitted"),
    ("finished_at", "finished"),
    ("slot_hours", "slot_hours"),
    ("losses", "losses"),
    ("parent", "parent"),
    ("error", "error"),
)


@click.command("export")
@click.option("--csv", "csv_path", type=PATH, help="CSV file with one row per trial; - prints it.")
@click.option("--parquet", type=PATH, help="Parquet file with the same rows; needs pyarrow.")
@click.option("--study", help="Only this study's trials.")
@state_dir
@scheduler_name
def export(
    csv_path: Path | None, parquet: Path | None, study: str | None, state_dir: Path | None, scheduler: str
) -> None:
    """Write trials with their parameters, values, times and slot hours as a table."""
    if csv_path is None and parquet is None:
        raise SchedulerError("no file is named; name one with --csv or --parquet")
    client = client_of(state_dir, scheduler, also_ended=True)
    asked = {"hours": True, **({} if study is None else {"study": client.study(study).name})}
    trials = client.connection.request("GET", "/rows", params=asked)["trials"]
    rows = [_exported(trial) for trial in trials]
    columns = list(dict.fromkeys(name for row in rows for name in row)) or [name for name, _ in COLUMNS]
    if csv_path is not None:
        _write_csv(csv_path, columns, rows)
    if parquet is not None:
        _write_parquet(parquet, columns, rows)
    for path in (csv_path, parquet):
        if path is not None and str(path) != "-":
            click.echo(f"{len(rows)} trials were written to {path}")


def _exported(trial: dict[str, Any]) -> dict[str, Any]:
    row = {name: trial.get(key) for name, key in COLUMNS}
    values = row["value"]
    if isinstance(values, list):
        del row["value"]
        row |= {f"value_{index}": value for index, value in enumerate(values)}
    return row | {f"param_{name}": value for name, value in trial.get("parameters", {}).items()}


def _write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    if str(path) == "-":
        writer = csv.DictWriter(sys.stdout, columns)
        writer.writeheader()
        writer.writerows(rows)
        return
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SchedulerError("Parquet needs pyarrow: pip install pyarrow; or use --csv") from None
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:
            values = [None if value is None else str(value) for value in values]
        elif kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        arrays[name] = pyarrow.array(values)
    parquet.write_table(pyarrow.table(arrays), path)


@click.command("report")
@click.option("--by", default="study", show_default=True, help="Group by study, user or day.")
@click.option("--price", type=click.FloatRange(min=0.0), help="Price of one slot hour; adds a column with the cost.")
@state_dir
@scheduler_name
def report(by: str, price: float | None, state_dir: Path | None, scheduler: str) -> None:
    """Sum slot hours and cost by study, user or day."""
    if by not in ("study", "user", "day"):
        raise SchedulerError(f"--by is {by!r}; it must be study, user or day")
    from scheduler.dashboard.listings import print_usage

    print_usage(client_of(state_dir, scheduler, also_ended=True).usage(), by=by, price=price)
