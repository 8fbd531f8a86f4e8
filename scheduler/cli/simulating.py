"""The command that runs policies in virtual time."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from scheduler.cli.connecting import PATH
from trials.terms import GOALS


@click.command("simulate")
@click.argument("workload", required=False, type=PATH)
@click.option(
    "--traces",
    type=PATH,
    help="Folder with measurements, one subfolder per application; default: the folder of the workload file.",
)
@click.option("--recorded", type=PATH, help="State folder of a scheduler whose trials to simulate.")
@click.option(
    "--policy",
    multiple=True,
    help="Policy to simulate; may be repeated, ratios are to the first; default: goodput, pollux and tiresias, or with "
    "--recorded goodput and fifo.",
)
@click.option(
    "--sweep",
    type=click.IntRange(min=2),
    help="Simulate an ASHA sweep of this many configurations instead of a workload.",
)
@click.option("--goal", default="completion_time", show_default=True, help=f"Goal of the sweep: {', '.join(GOALS)}.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; default: 16, or as recorded.")
@click.option(
    "--slots-per-node", type=click.IntRange(min=1), help="Number of slots on each node; default: 4, or as recorded."
)
@click.option(
    "--slots-per-replica",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --sweep: slots that each replica of a trial takes.",
)
@click.option(
    "--live/--no-live",
    default=None,
    help="Decide at events, not at fixed intervals, and let starts take time, as a live scheduler does. Default: with "
    "--recorded.",
)
@click.option(
    "--every", type=click.FloatRange(min=1.0), help="Seconds between decisions; default: 60, or none with --live."
)
@click.option(
    "--rescale-seconds",
    type=click.FloatRange(min=0.0),
    help="Pause in seconds of a job whose allocation changes; default: 30, or as measured with --live.",
)
@click.option(
    "--information",
    default="pooled",
    show_default=True,
    help="What a policy knows of a job: own (what the job has measured), declared (also its declared epochs), or "
    "pooled (also what jobs of the same code have measured).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Number of random jobs, without a workload file.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the random jobs, without a workload file."
)
@click.option("--json", "json_path", type=PATH, help="File for all figures, as JSON.")
@click.option("--picture", type=PATH, help="File for a picture of allocations and completion times (PNG).")
@click.option("--why", help="Job or configuration whose history to print, with the reasons.")
def simulate(
    policy: tuple[str, ...],
    sweep: int | None,
    goal: str,
    slots_per_replica: int,
    **options: Any,
) -> None:
    """Run policies over a workload in virtual time, and compare them."""
    from scheduler.simulator.command import ClusterOptions, Source, run, run_sweep

    cluster = ClusterOptions(**{each.name: options.pop(each.name) for each in fields(ClusterOptions)})
    if sweep is None:
        source = Source(**{each.name: options.pop(each.name) for each in fields(Source)})
        usual = ["goodput", "pollux", "tiresias"] if source.recorded is None else ["goodput", "fifo"]
        run(source, policies=list(policy) or usual, cluster=cluster, **options)
        return
    run_sweep(
        sweep,
        policies=list(policy) or ["goodput", "fair_share", "asha_static"],
        goal=goal,
        cluster=cluster,
        slots_per_replica=slots_per_replica,
        **{name: options[name] for name in ("seed", "picture", "why")},
    )
