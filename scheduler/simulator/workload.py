"""A workload: which jobs are submitted when. Read from a table, or drawn at random."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dist_core.goodput import BatchBounds, ThroughputParams
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.layout import Layout
from scheduler.simulator.application import Application, InvalidWorkload, ModelledApplication, measured_application


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    terms: tuple[LayoutTerms, ...]
    """As it is predicted."""
    applications: Mapping[str, Application]
    """Applications by layout: shares of a batch, their steps, and the batches that fit into memory."""
    slot_memory_bytes: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({each.layout.slots for each in self.terms}))

    def named(self, layout: str) -> Layout:
        """Return the layout of that name; of a number of slots, the one that its code predicts to be the fastest."""
        for each in self.terms:
            if str(each.layout) == layout:
                return each.layout
        slots = Layout.from_name(layout).slots
        alike = [each for each in self.terms if each.layout.slots == slots]
        fitting = [each for each in alike if each.fits(self.slot_memory_bytes)]
        return min(fitting or alike, key=lambda each: (each.seconds, each.layout)).layout

    def fits(self, layout: Layout) -> bool:
        return next(each for each in self.terms if each.layout == layout).fits(self.slot_memory_bytes)

    def only(self, *layouts: str) -> LayoutChoices:
        """Return the choice between these layouts."""
        return LayoutChoices(
            terms=tuple(each for each in self.terms if str(each.layout) in layouts),
            applications={name: self.applications[name] for name in layouts},
            slot_memory_bytes=self.slot_memory_bytes,
        )


COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    name: str
    at: float
    """Seconds from the start."""
    application: Application
    num_replicas: int
    """Replicas that its user asks for where jobs have a fixed size."""
    batch_size: int
    """Batch size that its user asks for where batch sizes are fixed."""
    max_replicas: int | None = None
    """Most that it may have where sizes are elastic; None: as many as are useful."""
    declared_progress: float | None = None
    """Length that it declares, in examples at the initial batch size; None: what its application trains."""
    slots_per_replica: int = 1
    slots_per_share: int | None = None
    """Slots that compute one share of a batch together, whose times are measured; None: those of a replica."""

    choices: LayoutChoices | None = None
    """Layouts, where the scheduler chooses how its replicas hold the model; None otherwise."""

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        return (self.slots_per_replica,) if self.choices is None else self.choices.sizes

    @property
    def share_size(self) -> int:
        return self.slots_per_replica if self.slots_per_share is None else self.slots_per_share


def read_workload(path: Path, traces: Path) -> list[Submission]:
    """Jobs in order of submission; raises InvalidWorkload with the line, the value and the rule.

    A further column ``slots_per_replica`` may say how many slots a replica of each job takes.
    """
    applications: dict[str, Application] = {}
    submissions: list[Submission] = []
    with _opened(path) as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise InvalidWorkload(f"{path} has no column {missing[0]!r}; a workload needs {', '.join(COLUMNS)}")
        for line, row in enumerate(reader, start=2):
            where = f"{path} line {line}"
            kind = row["application"]
            if kind not in applications:
                folder = traces / kind
                if not (folder / "placements.csv").is_file():
                    raise InvalidWorkload(
                        f"{where}: there are no measurements of application {kind!r} in {traces}; "
                        "name their folder with --traces"
                    )
                applications[kind] = measured_application(folder)
            submissions.append(_submission(row, applications, where))
    names = [submission.name for submission in submissions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidWorkload(f"{path} names job {twice!r} twice; names must differ")
    return sorted(submissions, key=lambda submission: submission.at)


def _opened(path: Path) -> TextIO:
    try:
        return open(path, newline="")
    except OSError as error:
        raise InvalidWorkload(f"the workload {path} cannot be read: {error.strerror}") from error


def _submission(row: Mapping[str, str], applications: Mapping[str, Application], where: str) -> Submission:
    numbers = {}
    for column, least in (("time", 0.0), ("num_replicas", 1.0), ("batch_size", 1.0), ("slots_per_replica", 1.0)):
        try:
            numbers[column] = float(row[column] if column in COLUMNS else row.get(column) or 1.0)
        except (TypeError, ValueError):
            raise InvalidWorkload(f"{where}: {column} is {row[column]!r}; it must be a number") from None
        if not math.isfinite(numbers[column]) or numbers[column] < least:
            raise InvalidWorkload(f"{where}: {column} is {row[column]}; it must be at least {least:g}")
    return Submission(
        name=row["name"],
        at=numbers["time"],
        application=applications[row["application"]],
        num_replicas=int(numbers["num_replicas"]),
        batch_size=int(numbers["batch_size"]),
        slots_per_replica=int(numbers["slots_per_replica"]),
    )


SMALL = ModelledApplication(
    name="small",
    bounds=BatchBounds(init_batch=128, max_batch=4096, min_atomic=32, max_atomic=1024),
    params=ThroughputParams(0.03, 0.0002, 0.08, 0.002, 0.02, 0.002, 1.6),
    epochs=30,
    steps_per_epoch=390.0,
    first_noise=2.0,
    last_noise=30.0,
)
MEDIUM = ModelledApplication(
    name="medium",
    bounds=BatchBounds(init_batch=20, max_batch=640, min_atomic=5, max_atomic=40),
    params=ThroughputParams(0.05, 0.02, 0.2, 0.003, 0.08, 0.003, 2.0),
    epochs=40,
    steps_per_epoch=400.0,
    first_noise=5.0,
    last_noise=40.0,
)
LARGE = ModelledApplication(
    name="large",
    bounds=BatchBounds(init_batch=200, max_batch=12800, min_atomic=25, max_atomic=200),
    params=ThroughputParams(0.05, 0.004, 0.15, 0.002, 0.06, 0.002, 2.5),
    epochs=60,
    steps_per_epoch=3000.0,
    first_noise=10.0,
    last_noise=100.0,
)
RIGID = ModelledApplication(
    name="rigid",
    bounds=BatchBounds(init_batch=256, max_batch=32768, min_atomic=256),
    params=ThroughputParams(0.01, 0.000002, 1.0, 0.1, 0.5, 0.1, 1.0),
    epochs=10,
    steps_per_epoch=1000.0,
    fixed_batch=4096,
)
SHARES = ((SMALL, 0.45, 4, 1024), (RIGID, 0.25, 1, 4096), (MEDIUM, 0.2, 4, 160), (LARGE, 0.1, 16, 3200))
"""Application, share of the jobs, and what its users ask for: replicas and batch size."""


def synthetic_workload(jobs: int, *, seed: int = 0, mean_seconds_between: float = 180.0) -> list[Submission]:
    """Poisson arrivals of jobs drawn by their shares; the same for the same seed."""
    chance = random.Random(seed)
    at = 0.0
    submissions = []
    for number in range(jobs):
        at += chance.expovariate(1.0 / mean_seconds_between)
        [(application, _, replicas, batch)] = chance.choices(SHARES, weights=[share[1] for share in SHARES])
        submissions.append(
            Submission(
                name=f"{application.name}-{number}",
                at=at,
                application=application,
                num_replicas=replicas,
                batch_size=batch,
            )
        )
    return submissions
