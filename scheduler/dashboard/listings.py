"""Listings of `elastune ls`, `show`, `why`, `studies`, `nodes` and `report`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

from scheduler.client.rows import Node, Queue, Study, Trial, UsedHours
from scheduler.dashboard.lines import STATE_COLORS, Column, clock, duration, print_table, shown
from trials.plain_words import one_line, printable
from trials.record import WaitingJob

Sums = tuple[str, tuple[float, int]]
"""A name, its slot hours and its number of trials."""


def trials_table(trials: Sequence[Trial], now: float) -> list[Column[Trial]]:
    """Return the columns for trials, with the study's where there are several."""
    several = len({trial.study for trial in trials}) > 1
    name: Column[Trial] = Column("trial", lambda trial: trial.label if several else trial.number)
    return [
        Column("id", lambda trial: trial.id),
        name,
        Column("state", lambda trial: trial.state, color=lambda trial: STATE_COLORS.get(trial.state, "")),
        Column("slots", _slots, right=True),
        Column("step", lambda trial: trial.step, right=True),
        Column("value", _value, right=True),
        Column("took", lambda trial: duration((trial.finished or now) - trial.submitted), right=True),
        Column("why", lambda trial: _why(trial, now)),
    ]


def _slots(trial: Trial) -> str:
    if trial.is_over:
        return ""
    return f"{trial.slots}/{trial.max * trial.size}"


def _value(trial: Trial) -> str:
    found = trial.latest if trial.value is None else trial.value
    return ", ".join(map(shown, found)) if isinstance(found, list) else shown(found)


def _why(trial: Trial, now: float) -> str:
    words = f"{trial.code}: {trial.error or trial.why}"
    if trial.is_waiting and trial.expected is not None:
        words += f" (starts in about {duration(trial.expected - now)})"
    return words


def print_trials(trials: Sequence[Trial], now: float) -> None:
    print_table(trials_table(trials, now), trials)


def print_studies(studies: Sequence[Study]) -> None:
    columns: list[Column[Study]] = [
        Column("study", lambda study: study.title),
        Column("name", lambda study: study.name),
        Column("user", lambda study: study.user or "-"),
        Column("sweep", lambda study: "runs" if study.driven else "over" if study.over == study.trials else "gone"),
        Column("over", lambda study: f"{study.over}/{study.trials}", right=True),
        Column("slots", lambda study: study.slots, right=True),
        Column("slot hours", lambda study: f"{study.slot_hours:.3f}", right=True),
        Column("weight", lambda study: study.weight, right=True),
        Column("priority", lambda study: study.priority, right=True),
        Column("quota", lambda study: study.quota, right=True),
        Column("goal", lambda study: study.goal),
        Column("deadline", lambda study: "-" if study.deadline_at is None else clock(study.deadline_at)),
        Column("budget", lambda study: study.budget_slot_hours, right=True),
    ]
    print_table(columns, studies)


def print_nodes(nodes: Sequence[Node]) -> None:
    columns: list[Column[Node]] = [
        Column("node", lambda node: node.name),
        Column("kind", lambda node: node.kind or "-"),
        Column("in use", lambda node: f"{node.used}/{node.slots}", right=True),
        Column("reserved for", lambda node: ", ".join(node.reserved_for) or "-"),
    ]
    if any(node.given_by for node in nodes):
        columns.append(Column("given by", lambda node: node.given_by or "-"))
    print_table(columns, nodes)


def print_queue(queue: Queue, now: float) -> None:
    """Print what waits, why no more does, and what the jobs have taken; nothing where there is nothing to say."""
    columns: list[Column[WaitingJob]] = [
        Column("job", lambda job: job.job),
        Column("queue", lambda job: job.queue),
        Column("slots", lambda job: job.slots, right=True),
        Column("waits for", lambda job: f"{now - job.since:.0f} s", right=True),
        Column("expected", lambda job: "-" if job.starts_at is None else clock(job.starts_at)),
        Column("why", lambda job: job.reason or "-"),
    ]
    waiting = [job for job in queue.jobs if job.waits]
    if waiting:
        print_table(columns, waiting)
    if queue.trouble:
        print(one_line(queue.trouble))
    if queue.held_hours is not None:
        print(f"jobs of the queue have held {queue.held_hours:.3f} slot hours")


def print_usage(used: Iterable[UsedHours], *, by: str, price: float | None) -> None:
    """Print slot hours added up ``by`` study, user or day, the most first; days in their order."""
    sums: dict[str, tuple[float, int]] = {}
    for row in used:
        name = {"study": row.title, "user": row.user or "unknown", "day": row.day}[by]
        hours, trials = sums.get(name, (0.0, 0))
        sums[name] = hours + row.hours, trials + row.trials
    ordered = sorted(sums.items()) if by == "day" else sorted(sums.items(), key=lambda item: -item[1][0])
    total = sum(hours for hours, _ in sums.values())
    columns: list[Column[Sums]] = [
        Column(by, lambda row: row[0]),
        Column("slot hours", lambda row: f"{row[1][0]:.3f}", right=True),
        Column("share", lambda row: f"{row[1][0] / total:.0%}" if total else "-", right=True),
    ]
    if price is not None:
        columns.append(Column("cost", lambda row: f"{row[1][0] * price:.2f}", right=True))
    rows = [*ordered, ("all", (total, sum(trials for _, trials in sums.values())))]
    print_table(columns, rows)


def _heading(trial: Mapping[str, Any]) -> str:
    return f"trial {trial['trial_id']} (study {trial['study']}, number {trial['number']}): {trial['state']}"


def _because(reason: Mapping[str, Any]) -> str:
    return f"{reason['code']}: {reason['sentence']}"


def print_why(answer: Mapping[str, Any]) -> None:
    """Print what `elastune why TRIAL` shows."""
    trial, grant = answer["trial"], answer["grant"]
    lines = [f"{_heading(trial)}, holds {answer['held_slots']} slots"]
    if answer["policy_error"] is not None:
        lines.append(f"the policy failed, so allocations stay as they are: {answer['policy_error']}")
    if grant is None:
        lines.append(f"why: {_because(trial['reason'])}")
    else:
        where = ", ".join(f"{count} on {node}" for node, count in grant["placement"].items()) or "none"
        lines.append(f"policy {answer['policy']} grants: {where}")
        lines.append(f"why: {_because(grant['reason'])}")
        lines += [f"  {name}: {value:.4g}" for name, value in grant["numbers"].items()]
    lines += [f"{clock(change['at'])} {change['what']}: {change['reason']['sentence']}" for change in answer["changes"]]
    lines += [answer["emulated"]] if answer.get("emulated") else []
    for line in lines:
        print(one_line(line))


def print_trial(trial: Mapping[str, Any]) -> None:
    """Print what `elastune show TRIAL` shows."""
    print(one_line(_heading(trial)))
    print(one_line(f"why: {_because(trial['reason'])}"))
    if trial.get("parent"):
        print(one_line(f"began with the state of trial {trial['parent']}"))
    if trial["outcome"] is not None and trial["outcome"].get("traceback"):
        print(indent(printable(trial["outcome"]["traceback"]), "  "))
    history: list[Column[Mapping[str, Any]]] = [
        Column("when", lambda entry: clock(entry["at"])),
        Column("who", lambda entry: entry["who"]),
        Column("what", lambda entry: entry["what"]),
        Column("why", lambda entry: _because(entry["reason"])),
    ]
    print_table(history, trial["history"])
    jobs: list[Column[Mapping[str, Any]]] = []
    if any(replica.get("job") for replica in trial["replicas"]):
        jobs.append(Column("job", lambda replica: replica["job"] or "-"))
    replicas: list[Column[Mapping[str, Any]]] = [
        Column("replica", lambda replica: replica["replica_id"]),
        Column("node", lambda replica: replica["node"]),
        Column("slot", lambda replica: replica["slot"], right=True),
        *jobs,
        Column("state", lambda replica: replica["state"]),
        Column("pid", lambda replica: replica["pid"], right=True),
        Column("exit status", lambda replica: replica["exit_status"]),
    ]
    print_table(replicas, trial["replicas"])
    if trial.get("emulated"):
        print(trial["emulated"])
