"""Settings of a pool of jobs, from the line that users write behind ``--slurm``.

``partition=scavenge account=x gpus=1 time=4:00:00 slots=0:32``: words are sbatch's own long options, and a few of ours,
which sbatch has not: how many slots there may be, and what they may cost.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.errors import SchedulerError
from trials.slurm.jobs import LOGS

OURS = ("hours", "idle", "per-hour", "price", "slots", "warn", "worth")
NOT_YOURS = {
    "begin": "the scheduler submits jobs when trials can use them",
    "clusters": "a pool uses one cluster",
    "hold": "held jobs never start",
    "parsable": "the scheduler reads sbatch's output",
    "quiet": "the scheduler reads sbatch's output",
    "test-only": "the scheduler tests the options itself",
    "wait": "the scheduler waits for its jobs itself",
    "array": "the scheduler submits jobs when trials can use them; set the number of slots with slots=0:32",
    "comment": "the scheduler recognizes its jobs by it",
    "dependency": "jobs that depend on others may never start",
    "error": "the agents' output is in the state folder, under agents/",
    "export": "the scheduler sets the agents' environment",
    "job-name": "job names show which study a job is for",
    "nodes": "each job runs on one node; set the number of slots with slots=0:32",
    "ntasks": "each job runs one agent, which starts all replicas of its node",
    "open-mode": "the agents' output is in the state folder, under agents/",
    "output": "the agents' output is in the state folder, under agents/",
    "signal": "the scheduler sets it; warn=120 sets the seconds before the time limit",
    "wrap": "each job runs an agent",
}
LARGEST = 100_000
EARLY_SECONDS = 60
"""Slurm may warn so much earlier than it was asked to."""
FORM = "such as 'partition=scavenge account=x gpus=1 time=4:00:00 slots=0:32'"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    options: Mapping[str, str | None]
    """Long options of sbatch; None for one without a value."""
    least_slots: int = 0
    most_slots: int = 16
    slots_per_job: int = 1
    """As far as the options tell; agents say how many there are. 0: only they can."""
    hours: float | None = None
    """Slot hours that all jobs together may take; None: no limit."""
    per_hour: int | None = None
    """Slots that may be asked for within an hour."""
    idle_seconds: float = 60.0
    """A job without replicas for so long is given back."""
    warn_seconds: int = 120
    """Before its time limit a job has its replicas save and leave."""
    price: float = 1.0
    """Price of a slot for an hour, in the currency of ``worth``."""
    worth: float = 10.0
    """Worth of an hour sooner, for each trial."""
    container: tuple[str, ...] = field(default=())
    """Options of srun that put agents into a container."""

    @property
    def where(self) -> str:
        """Return the queue's name, for people."""
        return self.options.get("partition") or "the default partition"

    def sbatch_options(self, log_folder: str | None) -> list[str]:
        """Return sbatch's options; ``log_folder``: for what agents print, None where nodes see none."""
        words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in self.options.items()]
        return [
            *words,
            "--nodes=1",
            "--ntasks=1",
            # One that is asked for anew starts sooner than one that was put back, and only where it is of use.
            *([] if "requeue" in self.options else ["--no-requeue"]),
            "--open-mode=append",
            f"--signal=B:USR1@{self.warn_seconds}",
            "--output=/dev/null" if log_folder is None else f"--output={log_folder}/{LOGS}",
        ]


def pool_settings(text: str, *, gpus_per_slot: int = 1, slots_per_gpu: int = 1) -> PoolSettings:
    """Read a pool's settings; raise SchedulerError for what means nothing."""
    options: dict[str, str | None] = {}
    ours: dict[str, str] = {}
    container: list[str] = []
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SchedulerError(f"--slurm is {text!r}: {error}; write options {FORM}") from error
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise SchedulerError(f"--slurm has {word!r}; it takes sbatch's long options, {FORM}")
        if name in NOT_YOURS:
            raise SchedulerError(f"--slurm has {word!r}: leave it out; {NOT_YOURS[name]}")
        if name in OURS:
            ours[name] = value
        elif name.startswith("container"):
            container.append(f"--{name}={value}" if equals else f"--{name}")
        else:
            options[name] = value if equals else None
    warn = int(_number("warn", ours.get("warn", "120")))
    limit = time_limit(options.get("time"))
    if limit is not None and limit <= warn + EARLY_SECONDS:
        raise SchedulerError(
            f"--slurm has time={options['time']}, but replicas leave {warn} s before the limit, and Slurm may warn a "
            f"minute earlier: jobs would do no work. Raise time, or lower warn={warn}"
        )
    slots_per_job = _slots_per_job(options, gpus_per_slot=gpus_per_slot, slots_per_gpu=slots_per_gpu)
    least, most = _bounds(ours.get("slots", f"0:{max(16, slots_per_job)}"))
    return PoolSettings(
        options=options,
        least_slots=least,
        most_slots=most,
        slots_per_job=slots_per_job,
        hours=_number("hours", ours["hours"]) if "hours" in ours else None,
        per_hour=int(_number("per-hour", ours["per-hour"])) if "per-hour" in ours else None,
        idle_seconds=_number("idle", ours.get("idle", "60")),
        warn_seconds=warn,
        price=_number("price", ours.get("price", "1")),
        worth=_number("worth", ours.get("worth", "10")),
        container=tuple(container),
    )


def _slots_per_job(options: dict[str, str | None], *, gpus_per_slot: int, slots_per_gpu: int) -> int:
    """Return the slots in what each job asks for; a GPU where nothing is said."""
    for name in ("gpus", "gpus-per-node", "gpus-per-task", "gres"):
        value = options.get(name)
        if value is not None and (name != "gres" or "gpu" in value):
            count = re.search(r"(?:^|:)(\d+)$", value.split(",")[0])
            gpus = int(count[1]) if count else 1
            if gpus < gpus_per_slot:
                raise SchedulerError(
                    f"--gpus-per-slot is {gpus_per_slot} but each job has {name}={value}; ask for more GPUs per job"
                )
            return max(1, gpus * slots_per_gpu // gpus_per_slot)
    cores = options.get("cpus-per-task")
    if "exclusive" in options:
        return 0
    if cores is not None:
        return int(cores) if cores.isdigit() else 0
    options["gpus"] = str(gpus_per_slot)
    return slots_per_gpu


def time_limit(text: str | None) -> float | None:
    """Seconds, of what `sbatch` takes for --time; None where there is no limit, or Slurm will say what is wrong."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text or "")
    if found is None:
        return None
    days, *rest = (None if part is None else int(part) for part in found.groups())
    first, second, third = rest
    assert first is not None
    if days is not None:
        return 86400.0 * days + 3600.0 * first + 60.0 * (second or 0) + (third or 0)
    if third is not None:
        return 3600.0 * first + 60.0 * (second or 0) + third
    return 60.0 * first + (second or 0)


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if match is None or not 1 <= int(match[2]) <= LARGEST or int(match[1] or 0) > int(match[2]):
        raise SchedulerError(
            f"--slurm has slots={text}; it must be MIN:MAX, such as slots=0:32, with MIN at most MAX and MAX from "
            f"1 to {LARGEST}"
        )
    return int(match[1] or 0), int(match[2])


def _number(name: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise SchedulerError(f"--slurm has {name}={text}; it must be a number that is not below 0")
    return float(text)
