"""Commands that run a scheduler."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from scheduler.cli.connecting import PATH, state_dir
from scheduler.client.finding import default_state_dir
from scheduler.errors import SchedulerError
from scheduler.state_folder import holder_of, is_held, read_server_file

START_SECONDS = 60.0
END_SECONDS = 130.0
"""Agents on other nodes have their replicas save before a scheduler ends."""


@click.command("up")
@state_dir
@click.option(
    "--slots", type=click.IntRange(min=1), help="Number of slots; default: one per GPU, else one per CPU core."
)
@click.option(
    "--slots-per-gpu",
    type=click.IntRange(min=1, max=64),
    default=1,
    show_default=True,
    help="Number of replicas that share one GPU.",
)
@click.option(
    "--gpus-per-slot",
    type=click.IntRange(min=1, max=64),
    default=1,
    show_default=True,
    help="GPUs of one slot, for code that spreads a model over several.",
)
@click.option(
    "--memory-per-slot", type=click.FloatRange(min=0.1), help="GiB of memory that a replica may use; default: no limit."
)
@click.option("--host", help="Address to listen on; default: 127.0.0.1, or in a Slurm job one that its nodes reach.")
@click.option("--port", type=click.IntRange(min=0, max=65535), help="Port to listen on; 0: any; default: 7300.")
@click.option("--policy", default="goodput", show_default=True, help="Scheduling policy.")
@click.option(
    "--fork-server/--no-fork-server", default=True, help="Start replicas by forking a process with torch loaded."
)
@click.option(
    "--emulate",
    help="Devices to emulate instead of using this machine's: NODESxSLOTS, or NODESxSLOTS:PROFILE@FACTOR, such as "
    "4x8:resnet50-imagenet@10 for ten times the speed of that profile. An unknown profile name lists all.",
)
@click.option(
    "--database",
    envvar="ELASTUNE_DATABASE",
    help="Database for trials, such as postgresql+psycopg://USER@HOST/NAME; default: a file in the state folder.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0.0),
    default=90.0,
    show_default=True,
    help="Days to keep finished trials and their logs; 0: forever.",
)
@click.option(
    "--webhook",
    envvar="ELASTUNE_WEBHOOK",
    help="URL to notify, with JSON, when a trial fails, a study is done, or 80% of a budget is used.",
)
@click.option(
    "--slurm",
    "pool",
    envvar="ELASTUNE_SLURM",
    help="Take slots from Slurm when trials can use them: sbatch's long options and limits, such as "
    "'partition=scavenge account=x gpus=1 time=4:00:00 slots=0:32'.",
)
@click.option(
    "--no-slurm",
    is_flag=True,
    envvar="ELASTUNE_NO_SLURM",
    help="Inside a Slurm job: use only this machine, not all of the job's nodes.",
)
@click.option(
    "--no-shared-files",
    is_flag=True,
    envvar="ELASTUNE_NO_SHARED_FILES",
    help="The Slurm nodes share no folder with this machine: working folders are packed and sent there, and logs "
    "and checkpoints are sent back.",
)
@click.option(
    "--interface",
    envvar="ELASTUNE_INTERFACE",
    default="",
    help="Network interface whose address nodes use to reach each other; default: the one that the route to them uses.",
)
@click.option(
    "--prologue",
    envvar="ELASTUNE_PROLOGUE",
    default="",
    help="Bash lines to run first on each other node, such as 'module load cuda'.",
)
@click.option(
    "--container",
    envvar="ELASTUNE_CONTAINER",
    default="",
    help="srun options that run everything on the other nodes in a container: '--container-image=img.sqsh'.",
)
@click.option("--detach", is_flag=True, help="Run in the background until `elastune down`, with output in a file.")
@click.option("--embedded/--no-embedded", default=False, hidden=True)
@click.option("--preload", default="torch", show_default=True, hidden=True)
def up(
    state_dir: Path | None,
    host: str | None,
    port: int | None,
    policy: str,
    database: str | None,
    keep_days: float,
    webhook: str | None,
    detach: bool,
    embedded: bool,
    **slots: Any,
) -> None:
    """Run a scheduler that owns this machine's slots, or its Slurm job's, until Ctrl-C."""
    if detach:
        _detach(state_dir or default_state_dir())
        return
    from scheduler.cli.sites import Wanted, choose_site

    folder = state_dir or default_state_dir()
    chosen = choose_site(
        Wanted(
            state_dir=folder,
            host=host,
            embedded=embedded,
            use_slurm=not slots.pop("no_slurm"),
            shares_files=not slots.pop("no_shared_files"),
            **slots,
        )
    )
    from scheduler.host.hosts import is_loopback, open_host_warning
    from scheduler.host.server import ServerSettings, serve
    from scheduler.log_lines import log_to_stderr

    log_to_stderr()

    def announce(url: str, token: str, page: str) -> None:
        if embedded:
            print(json.dumps({"url": url, "token": token}), flush=True)
            return
        click.echo(f"elastune scheduler listens at {url}")
        if chosen.sentence:
            click.echo(chosen.sentence)
        if not is_loopback(chosen.host):
            click.echo(open_host_warning(chosen.host), err=True)
        click.echo(f"watch it (the link opens once; `elastune page` prints another):\n  {url}{page}")
        click.echo(f"join it from another terminal:\n  export ELASTUNE_URL={url}")
        click.echo(f"  export ELASTUNE_TOKEN=$(cat {folder / 'token'})")
        click.echo(f"Ctrl-C stops the scheduler; {chosen.at_the_end}")

    try:
        serve(
            ServerSettings(
                state_dir=folder,
                host=chosen.host,
                reached_at=chosen.reached_at,
                port=port if port is not None or embedded else 7300,
                policy=policy,
                database=None if embedded else database,
                stop_with_stdin=embedded,
                keep_seconds=keep_days * 86400.0,
                webhook=webhook,
            ),
            chosen.make,
            on_listening=announce,
        )
    finally:
        chosen.close()


def _detach(folder: Path) -> None:
    """Start the same command without --detach as a process of its own; ends when it answers."""
    import subprocess

    from scheduler.client.connection import of_folder

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / "scheduler.log"
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with open(log, "a") as file:
        began = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduler.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        server = read_server_file(folder)
        if server is not None and server.get("pid") == process.pid:
            try:
                of_folder(folder).close()
            except SchedulerError:
                time.sleep(0.05)
                continue
            click.echo(
                f"the scheduler runs in the background, process {process.pid}; `elastune down` stops it\n  log: {log}"
            )
            click.echo("\n".join(_said_since(log, began).rstrip().splitlines()[:-1]))
            return
        time.sleep(0.05)
    if process.poll() is None:
        process.terminate()
    said = _said_since(log, began).strip().splitlines()
    raise SchedulerError(said[-1].removeprefix("elastune: ") if said else f"the scheduler did not start; see {log}")


def _said_since(log: Path, began: int) -> str:
    """Return what stands in a log behind so many bytes."""
    return log.read_bytes()[began:].decode(errors="replace")


@click.command("down")
@state_dir
def down(state_dir: Path | None) -> None:
    """Stop the scheduler of a state folder; its replicas save their state and leave."""
    import signal

    folder = state_dir or default_state_dir()
    pid = holder_of(folder)
    if pid is None:
        click.echo(f"no scheduler runs on {folder}")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while is_held(folder):
        if time.monotonic() > deadline:
            raise SchedulerError(f"the scheduler (process {pid}) was told to stop, but has not ended yet")
        time.sleep(0.05)
    click.echo(f"the scheduler of {folder} has ended")


@click.command("operator")
@click.option("--settings", type=PATH, required=True, help="YAML file with the cluster's settings.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104  # a pod's own
@click.option("--port", type=int, default=7300, show_default=True, help="Port of the API.")
@click.option(
    "--webhook-port", type=int, default=7443, show_default=True, help="Port for admission reviews and probes."
)
@click.option("--service", help="Name of the API's Service.")
@click.option("--url", help="URL by which replicas reach the API; default: its Service.")
@click.option("--webhook", help="Name of the ValidatingWebhookConfiguration that calls this scheduler.")
@click.option("--token-secret", help="Secret that keeps the token; ELASTUNE_TOKEN takes precedence.")
@click.option("--webhook-secret", help="Secret that keeps the webhook's certificate.")
@click.option(
    "--webhook-name",
    "webhook_names",
    multiple=True,
    help="Host name in the webhook's certificate, by which the API server calls it.",
)
@click.option("--policy", default="goodput", show_default=True, help="Scheduling policy.")
@click.option("--identity", default="", envvar="POD_NAME", help="Name of this process in the leader election.")
@click.option("--lease", default="elastune", show_default=True, help="Name of the leader's Lease.")
def operator(settings: Path, **options: Any) -> None:
    """Run a scheduler for a Kubernetes cluster, as the chart does."""
    try:
        from scheduler.kubernetes.server import run_operator
    except ImportError as error:
        raise SchedulerError(
            f"{error}; install the Kubernetes support with: pip install 'elastune[kubernetes]'"
        ) from error
    run_operator(settings, **options)
