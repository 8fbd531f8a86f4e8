"""The `elastune` command."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from dist_core.version import __version__
from scheduler.api.client import SchedulerClient, default_state_dir
from scheduler.errors import SchedulerError, SchedulerUnreachable
from scheduler.state_folder import read_server_file
from trials.errors import TrialsError
from trials.plain_words import printable
from trials.terms import GOALS

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Elastic hyperparameter tuning on shared GPUs.")


@app.callback()
def _elastune(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda wanted: _tell_version() if wanted else None)
    ] = False,
) -> None:
    pass


def _tell_version() -> None:
    print(f"elastune {__version__}")
    raise typer.Exit


StateDir = Annotated[
    Path | None, typer.Option(help="State folder; default: $ELASTUNE_HOME or the user's state folder.")
]


_opened = ExitStack()
"""Connections that this command has made."""


def _client(state_dir: Path | None) -> SchedulerClient:
    """The scheduler that ELASTUNE_URL names, else the one that runs on the state folder."""
    client = _find_client(state_dir)
    _opened.callback(client.close)
    return client


def _find_client(state_dir: Path | None) -> SchedulerClient:
    if state_dir is None:
        named = SchedulerClient.from_environ()
        if named is not None:
            return named
    folder = state_dir or default_state_dir()
    server = read_server_file(folder)
    if server is None:
        raise SchedulerError(
            f"no scheduler has run on {folder}; start one with `elastune up`, set ELASTUNE_URL, or name the folder of "
            "a sweep's own scheduler with --state-dir"
        )
    client = SchedulerClient(server["url"], (folder / "token").read_text().strip())
    try:
        client.check()
    except SchedulerUnreachable as error:
        client.close()
        raise SchedulerError(
            f"the scheduler of {folder} is not running (it was last at {server['url']}); a sweep's own one ends with "
            "its sweep, another is started with `elastune up --state-dir`"
        ) from error
    return client


def _trial_id(client: SchedulerClient, wanted: str) -> str:
    """The trial that an id, the beginning of one, or a number within its study stands for."""
    trials = client.request("GET", "/trials")
    found = [trial["trial_id"] for trial in trials if trial["trial_id"] == wanted] or [
        trial["trial_id"] for trial in trials if str(trial["number"]) == wanted or trial["trial_id"].startswith(wanted)
    ]
    if len(found) != 1:
        many = f"{len(found)} trials are" if found else "no trial is"
        raise SchedulerError(f"{many} called {wanted!r}; `elastune ls` lists their ids")
    return str(found[0])


@app.command()
def up(
    state_dir: StateDir = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Room for replicas; default: GPUs, else CPU cores.")] = None,
    slots_per_gpu: Annotated[int, typer.Option(min=1, max=64, help="Replicas that share a GPU.")] = 1,
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

    devices = None if emulate is None else emulation(emulate, slots=slots)
    # It imports what replicas need while this process imports what a scheduler needs.
    inherited = None if embedded else node_environ(os.environ)
    started = start_fork_server(stages_for(preload.split(",")), inherited) if fork_server else None
    from scheduler.host.hosts import is_loopback, open_host_warning
    from scheduler.host.server import ServerSettings, serve
    from scheduler.log_lines import log_to_stderr

    log_to_stderr()

    def announce(url: str, token: str) -> None:
        if embedded:
            print(json.dumps({"url": url, "token": token}), flush=True)
            return
        typer.echo(f"elastune scheduler listens at {url}")
        if devices is not None:
            typer.echo(devices.sentence)
        if not is_loopback(host):
            typer.echo(open_host_warning(host), err=True)
        typer.echo(f"join it from another terminal:\n  export ELASTUNE_URL={url}")
        typer.echo(f"  export ELASTUNE_TOKEN=$(cat {(state_dir or default_state_dir()) / 'token'})")
        typer.echo("Ctrl-C stops the scheduler; replicas save their state and leave when their lease runs out")

    try:
        serve(
            ServerSettings(
                state_dir=state_dir or default_state_dir(),
                slots=slots,
                slots_per_gpu=slots_per_gpu,
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


@app.command()
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


@app.command("ls")
def list_trials(state_dir: StateDir = None) -> None:
    """All trials with their state and the reason for it."""
    from scheduler.dashboard.terminal import print_trials

    print_trials(_client(state_dir).request("GET", "/overview"))


@app.command()
def top(state_dir: StateDir = None, seconds: Annotated[float, typer.Option(help="Between two looks.")] = 0.5) -> None:
    """Live view of studies, trials and slots."""
    from scheduler.dashboard.terminal import LiveView

    client = _client(state_dir)
    with LiveView() as view:
        while True:
            view.show(client.request("GET", "/overview"))
            time.sleep(seconds)


@app.command()
def show(trial: str, state_dir: StateDir = None) -> None:
    """One trial: its state, its replicas, and what happened to it when and why."""
    from scheduler.dashboard.terminal import print_trial

    client = _client(state_dir)
    print_trial(client.request("GET", f"/trials/{_trial_id(client, trial)}"))


@app.command()
def why(trial: str, state_dir: StateDir = None) -> None:
    """Why a trial has the slots that it has: the last decision, what went into it, and how it changed."""
    from scheduler.dashboard.terminal import print_why

    client = _client(state_dir)
    print_why(client.request("GET", f"/trials/{_trial_id(client, trial)}/why"))


@app.command()
def logs(trial: str, state_dir: StateDir = None) -> None:
    """What a trial's replicas printed, oldest replica first."""
    folder = (state_dir or default_state_dir()) / "logs" / trial
    if folder.is_dir():
        # Also those of a scheduler that has ended.
        for path in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime):
            typer.echo(f"==> {path.name} <==")
            typer.echo(printable(path.read_text(errors="replace")), nl=False)
        return
    client = _client(state_dir)
    for each in client.request("GET", f"/trials/{_trial_id(client, trial)}/log"):
        typer.echo(f"==> {each['replica_id']} <==")
        typer.echo(printable(each["words"]), nl=False)


@app.command()
def stop(trial: str, state_dir: StateDir = None) -> None:
    """Cancel a trial."""
    client = _client(state_dir)
    body = {"why": "cancelled with `elastune stop`"}
    client.request("POST", f"/trials/{_trial_id(client, trial)}/cancel", body)


@app.command("set")
def set_terms(
    study: Annotated[str, typer.Argument(help="Name of the study, or how it begins.")],
    weight: Annotated[float | None, typer.Option(help="Share of the slots relative to other studies.")] = None,
    priority: Annotated[int | None, typer.Option(help="Studies with a higher one come first.")] = None,
    yields_to: Annotated[list[str] | None, typer.Option(help="Study that comes first whatever its priority.")] = None,
    quota: Annotated[int | None, typer.Option(help="Most slots at once; 0: no limit.")] = None,
    goal: Annotated[str | None, typer.Option(help=f"One of {', '.join(GOALS)}.")] = None,
    deadline_in: Annotated[float | None, typer.Option(help="Minutes until its best result is wanted.")] = None,
    budget: Annotated[float | None, typer.Option(help="Slot-hours that it may use in all; 0: no limit.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Change a study's share, its place among others, or what its slots are to achieve; also while it runs."""
    client = _client(state_dir)
    name = _study_name(client, study)
    changes: dict[str, Any] = {
        "weight": weight,
        "priority": priority,
        "yields_to": yields_to,
        "goal": goal,
        "quota": quota,
        "budget_slot_hours": budget,
        "deadline_at": None if deadline_in is None else time.time() + 60.0 * deadline_in,
    }
    named = {name: value for name, value in changes.items() if value is not None}
    named.update({name: None for name in ("quota", "budget_slot_hours") if named.get(name) == 0})
    answer = client.request("PATCH", f"/studies/{quote(name)}", named)
    for term, value in answer["terms"].items():
        typer.echo(f"{term}: {value}")
    for warning in answer["warnings"]:
        typer.echo(f"elastune: {printable(warning)}", err=True)


def _study_name(client: SchedulerClient, wanted: str) -> str:
    """Of the one study that is called so: by its name, its title, or how one of these begins."""
    known: list[tuple[str, str]] = [(each["name"], each["title"]) for each in client.request("GET", "/studies")]
    found = [name for name, title in known if wanted in (name, title)]
    found = found or [name for name, title in known if name.startswith(wanted) or title.startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(sorted(found or (name for name, _ in known))) or "-"
        raise SchedulerError(f"{len(found) or 'no'} studies are called {wanted!r}; there are: {printable(names)}")
    return found[0]


@app.command()
def token(
    study: Annotated[str | None, typer.Argument(help="Study that the token is to be for.")] = None,
    read: Annotated[bool, typer.Option("--read", help="For reading metrics, overviews and decisions only.")] = False,
    replace: Annotated[
        bool, typer.Option(help="Make a new one and refuse the old one from now on; without --read or a study: yours.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Print a token that opens one study, or one that only reads; or replace a token."""
    if study is not None and read:
        raise SchedulerError("a token is for one study or for reading; leave out STUDY or --read")
    client = _client(state_dir)
    access = "read" if read else "owner" if study is None else "study"
    if access == "owner" and not replace:
        typer.echo(client.token)
        return
    body = {"access": access, "study": study or "", "replace": replace}
    typer.echo(client.request("POST", "/tokens", body)["token"])


@app.command()
def timeline(
    output: Annotated[Path, typer.Argument(help="Base name; writes BASE.png and BASE.html.")],
    state_dir: StateDir = None,
) -> None:
    """Draw who held which slots over time."""
    from scheduler.dashboard.picture import draw_timeline

    for path in draw_timeline(_client(state_dir).request("GET", "/timeline"), output):
        typer.echo(path)


@app.command()
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
        _opened.close()


if __name__ == "__main__":
    sys.exit(main())
