"""Table of commands and their modules: a command's module is loaded when that command is meant.

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
        "Print a link to the web page; serve the page if the folder's scheduler has ended.",
    ),
    "ls": Command(
        "looking",
        "list_trials",
        "List trials with their state and its reason, also of a sweep whose scheduler has ended.",
    ),
    "studies": Command("looking", "studies", "List studies with their trials, slots, slot hours and terms."),
    "nodes": Command("looking", "nodes", "List nodes with their slots, and how many are in use."),
    "top": Command("looking", "top", "Watch studies, trials and slots live."),
    "show": Command("looking", "show", "Show a trial's state, its replicas, and what happened to it, when and why."),
    "why": Command(
        "looking",
        "why",
        "Explain why a trial has its slots: the last decision, its numbers, and earlier changes.",
    ),
    "logs": Command("looking", "logs", "Print the output of a trial's replicas, oldest replica first."),
    "stop": Command("steering", "stop", "End a trial, or all trials of a study."),
    "pause": Command(
        "steering", "pause", "Pause a trial: it saves its state and frees its slots until `elastune resume`."
    ),
    "resume": Command("steering", "resume", "Continue a paused trial."),
    "retry": Command("steering", "retry", "Run a trial again, unchanged, as a new trial."),
    "clone": Command("steering", "clone", "Run a trial again with other parameters, as a new trial."),
    "extend": Command(
        "steering", "extend", "Train a trial for more epochs, as a new trial that begins with its state."
    ),
    "fork": Command("steering", "fork", "Train on from where a trial stands, as a new trial with other parameters."),
    "set": Command(
        "steering",
        "set_terms",
        "Change a study's weight, priority, quota, goal or budget, also while it runs.",
    ),
    "rm": Command("keeping", "remove", "Delete trials that ended long ago, with their reports, histories and logs."),
    "export": Command(
        "keeping", "export", "Write trials with their parameters, values, times and slot hours as a table."
    ),
    "report": Command("keeping", "report", "Sum slot hours and cost by study, user or day."),
    "timeline": Command("looking", "timeline", "Draw which trial held which slots over time."),
    "simulate": Command("simulating", "simulate", "Run policies over a workload in virtual time, and compare them."),
    "token": Command("steering", "token", "Print a token for one study or for reading, or replace a token."),
    "doctor": Command(
        "doctor",
        "doctor",
        "Check GPUs, cores, memory, control groups, folders, ports and versions for problems.",
    ),
    "completion": Command("completing", "completion", "Print a shell's completion script."),
    "operator": Command("running", "operator", "Run a scheduler for a Kubernetes cluster, as the chart does."),
}
