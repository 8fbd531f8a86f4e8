"""Commands that run a scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from scheduler.api.client import default_state_dir
from scheduler.cli.connecting import StateDir
from scheduler.errors import SchedulerError


def up(
    state_dir: StateDir = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Room for replicas; default: GPUs, else CPU cores.")] = None,
    slots_per_gpu: Annotated[int, typer.Option(min=1, max=64, help="Replicas that share a GPU.")] = 1,
    gpus_per_slot: Annotated[
        int, typer.Option(min=1, max=64, help="GPUs that one process has, for code that spreads a model over several.")
    ] = 1,
    memory_per_slot: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of memory that a replica may use; default: no limit.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 7300.")] = None,
    policy: Annotated[str, typer.Option(help="Who gets which slots.")] = "goodput",
    fork_server: Annotated[bool, typer.Option(help="Start replicas by forking a process with torch loaded.")] = True,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="Devices to emulate instead of using this machine's: NODESxSLOTS, or NODESxSLOTS:PROFILE@FACTOR, such "
            "as 4x8:resnet50-imagenet@10 for ten times the speed of that profile. A name it does not know lists all."
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="ELASTUNE_DATABASE",
            help="Keep trials there, such as postgresql+psycopg://USER@HOST/NAME; default: a file in the state folder.",
        ),
    ] = None,
    keep_days: Annotated[
        float, typer.Option(min=0.0, help="How long trials that are over are kept, with their logs; 0: for ever.")
    ] = 90.0,
    embedded: Annotated[bool, typer.Option(hidden=True)] = False,
    preload: Annotated[str, typer.Option(hidden=True)] = "torch",
) -> None:
    """Run a scheduler that owns this machine's slots, until Ctrl-C."""
    from scheduler.host.replica_modules import stages_for
    from trials.launch.emulated import emulation
    from trials.launch.fork.start import start_fork_server
    from trials.launch.node_environ import node_environ

    if slots_per_gpu > 1 and gpus_per_slot > 1:
        raise SchedulerError(
            f"--slots-per-gpu is {slots_per_gpu} and --gpus-per-slot {gpus_per_slot}; a slot is a part of a GPU or has "
            "several: leave one of them out"
        )
    devices = None if emulate is None else emulation(emulate, slots=slots)
    # It imports what replicas need while this process imports what a scheduler needs.
    inherited = None if embedded else node_environ(os.environ)
    started = start_fork_server(stages_for(preload.split(",")), inherited) if fork_server else None
    from scheduler.host.hosts import is_loopback, open_host_warning
    from scheduler.host.server import ServerSettings, serve
    from scheduler.log_lines import log_to_stderr

    log_to_stderr()

    def announce(url: str, token: str, page: str) -> None:
        if embedded:
            print(json.dumps({"url": url, "token": token, "page": page}), flush=True)
            return
        typer.echo(f"elastune scheduler listens at {url}")
        if devices is not None:
            typer.echo(devices.sentence)
        if not is_loopback(host):
            typer.echo(open_host_warning(host), err=True)
        typer.echo(f"watch it (the link opens once; `elastune page` prints another):\n  {url}{page}")
        typer.echo(f"join it from another terminal:\n  export ELASTUNE_URL={url}")
        typer.echo(f"  export ELASTUNE_TOKEN=$(cat {(state_dir or default_state_dir()) / 'token'})")
        typer.echo("Ctrl-C stops the scheduler; replicas save their state and leave when their lease runs out")

    try:
        serve(
            ServerSettings(
                state_dir=state_dir or default_state_dir(),
                slots=slots,
                slots_per_gpu=slots_per_gpu,
                gpus_per_slot=gpus_per_slot,
                memory_per_slot=memory_per_slot,
                host=host,
                port=port if port is not None or embedded else 7300,
                policy=policy,
                fork_server=started,
                emulate=devices,
                database=None if embedded else database,
                stop_with_stdin=embedded,
                keep_seconds=keep_days * 86400.0,
            ),
            on_listening=announce,
        )
    finally:
        if started is not None:
            started.close()


def operator(
    settings: Annotated[Path, typer.Option(help="The cluster's settings, a YAML file.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104  # a pod's own
    port: Annotated[int, typer.Option(help="Port of the API.")] = 7300,
    webhook_port: Annotated[int, typer.Option(help="Port for admission reviews and probes.")] = 7443,
    service: Annotated[str | None, typer.Option(help="Service that leads to the API.")] = None,
    url: Annotated[str | None, typer.Option(help="Where replicas reach the API; default: its service.")] = None,
    webhook: Annotated[str | None, typer.Option(help="ValidatingWebhookConfiguration that asks this one.")] = None,
    token_secret: Annotated[str | None, typer.Option(help="Secret for the token; default: ELASTUNE_TOKEN.")] = None,
    webhook_secret: Annotated[str | None, typer.Option(help="Secret for the webhook's certificate.")] = None,
    webhook_name: Annotated[list[str] | None, typer.Option(help="Name that the API server calls it by.")] = None,
    policy: Annotated[str, typer.Option(help="Who gets which slots.")] = "goodput",
    identity: Annotated[str, typer.Option(envvar="POD_NAME", help="Of this process among its like.")] = "",
    lease: Annotated[str, typer.Option(help="Lease that the leader holds.")] = "elastune",
) -> None:
    """Run a scheduler for a Kubernetes cluster; the chart starts it so."""
    try:
        from scheduler.kubernetes.command import run_operator
    except ImportError as error:
        raise SchedulerError(
            f"{error}; the cluster's part is installed with: pip install 'elastune[kubernetes]'"
        ) from error
    run_operator(
        settings,
        host=host,
        port=port,
        webhook_port=webhook_port,
        service=service,
        url=url,
        webhook=webhook,
        token_secret=token_secret,
        webhook_secret=webhook_secret,
        webhook_names=tuple(webhook_name or ()),
        policy=policy,
        identity=identity,
        lease=lease,
    )
