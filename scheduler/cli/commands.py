"""Which commands there are, and where: a command's module is loaded when that command is meant.

The sentence of each is here for `elastune --help`, which loads none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import click


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    function: str
    sentence: str
    """The first of the function's docstring."""
    hidden: bool = False

    def load(self) -> click.Command:
        found: click.Command = getattr(import_module(f"scheduler.cli.{self.module}"), self.function)
        return found


COMMANDS: dict[str, Command] = {
    "up": Command("running", "up", "Run a scheduler that owns this machine's slots, or its Slurm job's, until Ctrl-C."),
    "down": Command(
        "running", "down", "Stop the scheduler of a state folder; its replicas save their state and leave."
    ),
    "page": Command(
        "looking",
        "page",
        "Print a link that opens the web page once; serves it itself where the folder's scheduler has ended.",
    ),
    "ls": Command(
        "looking",
        "list_trials",
        "Trials with their state and the reason for it; also of a sweep whose scheduler has ended.",
    ),
    "studies": Command("looking", "studies", "Studies with their trials, slots, slot hours and terms."),
    "nodes": Command("looking", "nodes", "Nodes with their slots, and how many are in use."),
    "top": Command("looking", "top", "Live view of studies, trials and slots."),
    "show": Command("looking", "show", "One trial: its state, its replicas, and what happened to it when and why."),
    "why": Command(
        "looking",
        "why",
        "Why a trial has the slots that it has: the last decision, what went into it, and how it changed.",
    ),
    "logs": Command("looking", "logs", "What a trial's replicas printed, oldest replica first."),
    "stop": Command("steering", "stop", "End a trial, or all of a study."),
    "pause": Command(
        "steering", "pause", "Have a trial save its state and give its slots back until `elastune resume`."
    ),
    "resume": Command("steering", "resume", "Let a paused trial go on."),
    "retry": Command("steering", "retry", "Run a trial once more, as it was: as a new trial."),
    "clone": Command("steering", "clone", "Run a trial again with other parameters: as a new trial."),
    "set": Command(
        "steering",
        "set_terms",
        "Change a study's share, its place among others, or what its slots are to achieve; also while it runs.",
    ),
    "rm": Command("keeping", "remove", "Forget trials that ended long ago, with their reports, histories and logs."),
    "export": Command(
        "keeping", "export", "Write trials with their parameters, values, times and slot hours as a table."
    ),
    "report": Command("keeping", "report", "Slot hours and their cost by study, user or day."),
    "timeline": Command("looking", "timeline", "Draw who held which slots over time."),
    "simulate": Command("simulating", "simulate", "Run policies over a workload in virtual time, and compare them."),
    "token": Command(
        "steering", "token", "Print a token that opens one study, or one that only reads; or replace a token."
    ),
    "doctor": Command(
        "doctor",
        "doctor",
        "Look at GPUs, cores, memory, control groups, folders, ports and versions, and say what would go wrong.",
    ),
    "completion": Command("completing", "completion", "Print what a shell needs to complete commands and options."),
    "operator": Command("running", "operator", "Run a scheduler for a Kubernetes cluster; the chart starts it so."),
}
