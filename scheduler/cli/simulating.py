"""The command that runs policies in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trials.terms import GOALS


def simulate(
    workload: Annotated[
        Path | None, typer.Argument(help="CSV: name,time,application,num_replicas,batch_size. Default: random jobs.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder with measurements, one folder an application; default: the workload's.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="State folder of a scheduler: simulate the trials that it has run.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="May be given several times; ratios are to the first.")
    ] = None,
    sweep: Annotated[
        int | None,
        typer.Option(min=2, help="Instead of a workload: an ASHA sweep of so many configurations."),
    ] = None,
    goal: Annotated[str, typer.Option(help=f"What the sweep is to achieve: {', '.join(GOALS)}.")] = "auto",
    nodes: Annotated[int, typer.Option(min=1)] = 16,
    slots_per_node: Annotated[int, typer.Option(min=1)] = 4,
    slots_per_replica: Annotated[
        int, typer.Option(min=1, help="With --sweep: slots that each replica of a trial takes.")
    ] = 1,
    live: Annotated[
        bool,
        typer.Option(help="As a live scheduler does: it decides when something happens, and starts take time."),
    ] = False,
    every: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds between decisions; 60, or none with --live.")
    ] = None,
    rescale_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Pause of a job whose allocation changes; 30, or what was seen with --live."),
    ] = None,
    information: Annotated[
        str, typer.Option(help="What policies know: own measurements, declared epochs too, or pooled by code too.")
    ] = "pooled",
    jobs: Annotated[int, typer.Option(min=1, help="Without a workload file: number of random jobs.")] = 60,
    seed: Annotated[int, typer.Option(help="Without a workload file: which random jobs.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write allocations and completion times here, as PNG.")] = None,
    why: Annotated[
        str | None, typer.Option(help="Tell what happened to this job, or this configuration of a sweep, and why.")
    ] = None,
) -> None:
    """Run policies over a workload in virtual time, and compare them."""
    from scheduler.simulator.command import run, run_sweep

    if sweep is not None:
        run_sweep(
            sweep,
            policies=policy or ["goodput", "fair_share", "asha_static"],
            goal=goal,
            nodes=nodes,
            slots_per_node=slots_per_node,
            live=live,
            every=every,
            rescale_seconds=rescale_seconds,
            seed=seed,
            picture=picture,
            why=why,
            slots_per_replica=slots_per_replica,
        )
        return
    run(
        workload,
        traces,
        recorded=recorded,
        policies=policy or ["goodput", "pollux", "tiresias"],
        nodes=nodes,
        slots_per_node=slots_per_node,
        live=live,
        every=every,
        rescale_seconds=rescale_seconds,
        information=information,
        jobs=jobs,
        seed=seed,
        json_path=json_path,
        picture=picture,
        why=why,
    )
