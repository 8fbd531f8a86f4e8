"""`elastune simulate`: reads or draws a workload, runs the policies, prints the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from rich.console import Console

from scheduler.simulator.application import InvalidWorkload
from scheduler.simulator.as_it_ran import AsItRan
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.recorded import Recorded, RecordedWorld, read_recorded
from scheduler.simulator.replicas import LIVE, LIVE_PAUSE_SECONDS
from scheduler.simulator.rivals import compared_policy
from scheduler.simulator.summary import summarize, sweep_table, table, to_json
from scheduler.simulator.sweep import SweepResult, SweepSettings, SweepWorld, learning_curves
from scheduler.simulator.training import Request
from scheduler.simulator.workload import SMALL, Submission, read_workload, synthetic_workload
from scheduler.simulator.world import SimulationResult, World
from scheduler.snapshot import Policy
from trials.checks import is_number
from trials.terms import Goal, StudyTerms

RUNGS = (0.04, 0.12, 0.34)
"""Parts of a trial's length after which it is stopped unless it is among the best third."""
DEADLINE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The simulated cluster, and its time, as a user has it; None: as usual."""

    nodes: int | None = None
    slots_per_node: int | None = None
    live: bool | None = None
    every: float | None = None
    rescale_seconds: float | None = None

    def or_else(self, *, nodes: int, slots_per_node: int, live: bool) -> ClusterOptions:
        return replace(
            self,
            nodes=self.nodes or nodes,
            slots_per_node=self.slots_per_node or slots_per_node,
            live=live if self.live is None else self.live,
        )

    def settings(self) -> SimulationSettings:
        """Return the settings; defaults are a decision a minute and pauses of 30 s, as published, or ``live`` ones."""
        every, pause = (0.0, LIVE_PAUSE_SECONDS) if self.live else (60.0, 30.0)
        return SimulationSettings(
            nodes=self.nodes or 16,
            slots_per_node=self.slots_per_node or 4,
            decide_every_seconds=every if self.every is None else self.every,
            rescale_seconds=pause if self.rescale_seconds is None else self.rescale_seconds,
            timing=LIVE if self.live else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Jobs to simulate: those of a workload file, of a scheduler's record, or drawn at random."""

    workload: Path | None
    traces: Path | None
    recorded: Path | None
    jobs: int
    seed: int


@contextmanager
def _quiet_loop() -> Iterator[None]:
    """Silence the loop's log, which would tell of each of thousands of trials."""
    loop = logging.getLogger("scheduler.loop")
    before = loop.level
    loop.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        loop.setLevel(before)


@_quiet_loop()
def run(
    source: Source,
    *,
    policies: list[str],
    cluster: ClusterOptions,
    information: str,
    json_path: Path | None,
    picture: Path | None,
    why: str | None = None,
) -> None:
    """Run the simulations; raise InvalidWorkload or ValueError with one message for whatever cannot be used.

    What ``cluster`` leaves open is as it was recorded, and else as published simulators have it.
    """
    if information not in get_args(Information):
        raise ValueError(f"information is {information!r}; choose one of {', '.join(get_args(Information))}")
    console = Console()
    ran: AsItRan | None = None
    if source.recorded is not None and source.workload is not None:
        raise ValueError("a workload file and --recorded were given; leave one out")
    recording = None if source.recorded is None else read_recorded(source.recorded)
    if recording is not None:
        cluster = cluster.or_else(nodes=recording.ran.nodes, slots_per_node=recording.ran.slots_per_node, live=True)
    settings = cluster.settings()
    world: Callable[[Sequence[Submission], Policy, SimulationSettings], World] = World
    if recording is not None:
        submissions, ran = recording.submissions, recording.ran
        if recording.skipped:
            console.print(f"{recording.skipped} trials without measurements are left out")
        # As one line, which the page looks for.
        console.print(recording.ran.sentence, highlight=False, soft_wrap=True)
        if cluster.live:
            pause = recording.pause_seconds if cluster.rescale_seconds is None else cluster.rescale_seconds
            settings = replace(settings, timing=recording.timing, rescale_seconds=pause)

        def world(jobs: Sequence[Submission], policy: Policy, settings: SimulationSettings) -> World:
            return RecordedWorld(recording, policy, settings)

    else:
        submissions = _submissions(source)
    with console.status("simulating") as status:
        results = compare(
            submissions,
            policies,
            settings,
            cast("Information", information),
            world=world,
            on_done=lambda result: status.update(f"{result.policy} is done"),
        )
    console.print(table([summarize(result) for result in results]))
    for result in results if recording is not None else ():
        if recording is not None and result.policy == "fifo":
            console.print(_with_fewest_slots(recording, result), highlight=False, soft_wrap=True)
    _tell(console, why, results)
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(results)))
    if picture is not None:
        from scheduler.simulator.picture import draw

        draw(results, picture, ran)


@_quiet_loop()
def run_sweep(
    configurations: int,
    *,
    policies: list[str],
    goal: str,
    cluster: ClusterOptions,
    seed: int,
    picture: Path | None,
    why: str | None = None,
    slots_per_replica: int = 1,
) -> None:
    """Run a sweep of modelled trials under each policy; raise ValueError for a name that does not exist."""
    terms = StudyTerms(goal=cast("Goal", goal), deadline_at=DEADLINE_SECONDS if goal == "deadline" else None)
    settings = cluster.settings()
    curves = learning_curves(configurations, SMALL.epochs, seed=seed)
    console = Console()
    results = []
    with console.status("simulating") as status:
        for policy in [compared_policy(name) for name in policies]:
            status.update(f"{policy.name} runs")
            static = policy.name in REQUESTS
            sweep = SweepSettings(
                max_replicas=1 if static else 8,
                slots_per_replica=slots_per_replica,
                at_a_time=max(1, settings.nodes * settings.slots_per_node // slots_per_replica),
                rungs=tuple(max(1, round(part * SMALL.epochs)) for part in RUNGS),
                goal=terms.goal,
                deadline_seconds=terms.deadline_at,
            )
            results.append(SweepWorld(curves, SMALL, policy, settings, sweep).sweep())
    console.print(sweep_table(results))
    _tell(console, why, results)
    if picture is not None:
        from scheduler.simulator.picture import draw_sweeps

        draw_sweeps(results, picture)


def _with_fewest_slots(recorded: Recorded, simulated: SimulationResult) -> str:
    """Say what the recorded trials would have taken with the fewest slots each, first come, first served."""
    ended = {job.name: job.finished_at for job in simulated.jobs}
    words = f"with the fewest slots for each trial: {simulated.makespan_seconds:.0f} s"
    valued = [trial for trial in recorded.trials if trial.finished_at is not None and is_number(trial.outcome.value)]
    if len(recorded.studies) != 1 or not valued:
        return words
    [study] = recorded.studies.values()
    sign = -1.0 if study.direction == "minimize" else 1.0
    best = max(valued, key=lambda trial: sign * trial.outcome.value)
    name = best.submission.name
    return f"{words}; {name}, the best, ends after {ended[name]:.0f} s, and ended after {best.finished_at:.0f} s"


def _tell(console: Console, job: str | None, results: Sequence[SimulationResult | SweepResult]) -> None:
    """Print under each policy what happened to this job and why; raise ValueError when there is no such job."""
    if job is None:
        return
    for result in results:
        if job not in result.histories:
            raise ValueError(f"no job is called {job!r}; some that are: {', '.join(list(result.histories)[:5])}")
        console.print(f"\n{job} under {result.policy}")
        for told in result.histories[job]:
            console.print(f"{told.at:9.0f} s  {told.what}: {told.why}", highlight=False, markup=False)


def _submissions(source: Source) -> list[Submission]:
    if source.workload is None:
        return synthetic_workload(source.jobs, seed=source.seed)
    submissions = read_workload(source.workload, source.traces or source.workload.parent)
    if not submissions:
        raise InvalidWorkload(f"{source.workload} holds no job")
    return submissions


Information = Literal["own", "declared", "pooled"]
"""Information that a policy has of a job: what it has measured itself; its declared epochs as well; what all jobs
that run the same code have measured as well."""

REQUESTS: dict[str, Request] = {"fifo": "rigid", "asha_static": "rigid", "tiresias": "rigid", "optimus": "fixed_batch"}
"""Policies for jobs whose users choose the size, or the batch size; all others adapt both."""
ORACLES = frozenset({"optimus"})
OWN_ONLY = frozenset({"pollux"})
"""Uses nothing beyond what each job has measured, whatever is offered."""


def settings_for(name: str, settings: SimulationSettings, information: Information) -> SimulationSettings:
    own = name in OWN_ONLY or information == "own"
    return replace(
        settings,
        request=REQUESTS.get(name, "elastic"),
        oracle=name in ORACLES,
        declares_length=not own,
        pools=not own and information == "pooled",
    )


def compare(
    submissions: Sequence[Submission],
    policies: Iterable[str],
    settings: SimulationSettings,
    information: Information = "pooled",
    *,
    world: Callable[[Sequence[Submission], Policy, SimulationSettings], World] = World,
    on_done: Callable[[SimulationResult], None] = lambda result: None,
) -> list[SimulationResult]:
    """Return one result a policy, in order; raise ValueError for a name that does not exist."""
    chosen = [(name, compared_policy(name)) for name in policies]
    results = []
    for name, policy in chosen:
        results.append(world(submissions, policy, settings_for(name, settings, information)).run())
        on_done(results[-1])
    return results
