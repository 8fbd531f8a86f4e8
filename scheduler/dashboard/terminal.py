"""The sweep in the terminal: progress, slots, running trials, and why sizes changed."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import indent
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scheduler.dashboard.colors import trial_color
from trials.plain_words import one_line, printable

FINAL = ("succeeded", "pruned", "cancelled", "failed")
REFRESH_SECONDS = 0.25
WIDE = 240
"""Characters of a line that is read by no terminal."""

CHANGES_SHOWN = 5


def sweep_view(overview: Mapping[str, Any], *, title: str = "", total: int | None = None) -> RenderableType:
    """One frame: a pure function of the API's overview."""
    trials = overview["trials"]
    parts: list[RenderableType] = [_progress(trials, title, total), _slots(overview), _running(trials)]
    if overview.get("emulated"):
        parts.append(_plain(overview["emulated"], style="dim"))
    changes = overview.get("changes", [])[-CHANGES_SHOWN:]
    if changes:
        parts.append(_changes(changes, trials))
    return Group(*parts)


def _progress(trials: list[dict[str, Any]], title: str, total: int | None) -> RenderableType:
    done = sum(trial["state"] in FINAL for trial in trials)
    pruned = sum(trial["state"] == "pruned" for trial in trials)
    failed = sum(trial["state"] == "failed" for trial in trials)
    of = total if total is not None else len(trials)
    grid = Table.grid(padding=(0, 1))
    words = f"{done}/{of} trials"
    if pruned:
        words += f", {pruned} pruned"
    if failed:
        words += f", {failed} failed"
    grid.add_row(_plain(title, style="bold"), ProgressBar(total=max(of, 1), completed=done, width=40), words)
    return grid


def _slots(overview: Mapping[str, Any]) -> RenderableType:
    total = sum(node["slots"] for node in overview["nodes"])
    line = Text("slots ")
    used = 0
    for trial in overview["trials"]:
        for _ in range(trial.get("slots") or 0):
            line.append("■ ", style=trial_color(trial["number"]))
            used += 1
    line.append("□ " * max(0, total - used), style="dim")
    line.append(f" {used} of {total} in use")
    return line


def _running(trials: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("trial", "state", "replicas", "batch", "goodput/s", "promise", "step", "value", "done"):
        table.add_column(column, justify="left" if column in ("trial", "state") else "right")
    for trial in trials:
        if trial["state"] in FINAL:
            continue
        latest = trial.get("latest") or {}
        share = trial.get("share_done")
        table.add_row(
            Text(f"{trial['number']}", style=trial_color(trial["number"])),
            _plain(trial["state"]),
            _replicas(trial),
            _number(trial.get("batch"), "{:d}"),
            _number(trial.get("goodput"), "{:.0f}"),
            _number(trial.get("promise"), "{:.2f}"),
            _number(latest.get("step"), "{:d}"),
            _number(latest.get("value"), "{:.4f}"),
            _number(share, "{:.0%}"),
        )
    return table


def _replicas(trial: Mapping[str, Any]) -> str:
    """How many of how many, and of how many slots each where that is more than one, or was chosen."""
    size = trial.get("slots_per_replica", 1)
    layout = trial.get("layout") or str(size)
    return f"{trial['replicas']}/{trial['max_replicas']}" + (f" x{layout}" if layout != "1" else "")


def _changes(changes: list[dict[str, Any]], trials: list[dict[str, Any]]) -> RenderableType:
    numbers = {trial["trial_id"]: trial["number"] for trial in trials}
    lines = Table.grid(padding=(0, 1))
    for change in changes:
        number = numbers.get(change["trial_id"])
        if number is None:
            continue
        lines.add_row(
            Text(f"trial {number}", style=trial_color(number)),
            _plain(change["what"]),
            _plain(_with_numbers(change["reason"]["sentence"], numbers), style="dim"),
        )
    return lines


def _with_numbers(sentence: str, numbers: Mapping[str, int]) -> str:
    """People know trials by their number in the study."""
    for trial_id, number in numbers.items():
        sentence = sentence.replace(trial_id, f"trial {number}")
    return sentence


def _plain(words: str, style: str = "") -> Text:
    """Somebody's words, as they are: not markup, and nothing for the terminal to obey."""
    return Text(one_line(words), style=style)


def _heading(trial: Mapping[str, Any]) -> str:
    return f"trial {trial['trial_id']} (study {trial['study']}, number {trial['number']}): {trial['state']}"


def _because(reason: Mapping[str, Any]) -> str:
    return f"{reason['code']}: {reason['sentence']}"


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


class LiveView:
    """A frame that is redrawn in place; without a terminal it prints changes of size as lines."""

    def __init__(self, *, title: str = "", total: int | None = None) -> None:
        self._console = Console(stderr=False)
        self._live = Live(console=self._console, refresh_per_second=1 / REFRESH_SECONDS, transient=False)
        self._title = title
        self._total = total
        self._printed = 0

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def console(self) -> Console:
        return self._console

    def show(self, overview: Mapping[str, Any]) -> None:
        if self._console.is_terminal:
            self._live.update(sweep_view(overview, title=self._title, total=self._total))
            return
        numbers = {trial["trial_id"]: trial["number"] for trial in overview["trials"]}
        for change in overview.get("changes", [])[self._printed :]:
            number = numbers.get(change["trial_id"], change["trial_id"])
            sentence = _with_numbers(change["reason"]["sentence"], numbers)
            print(one_line(f"trial {number}: {change['what']}: {sentence}"), flush=True)
        self._printed = len(overview.get("changes", []))


@contextmanager
def show_while(fetch: Callable[[], Mapping[str, Any]], *, title: str, total: int | None) -> Iterator[None]:
    """Keep a live view up to date in the background; log lines (Optuna's) appear above it."""
    stop = threading.Event()
    with LiveView(title=title, total=total) as view:

        def refresh() -> None:
            while not stop.wait(REFRESH_SECONDS):
                _try_show(view, fetch)

        handlers = _logs_above(view.console) if view.console.is_terminal else []
        thread = threading.Thread(target=refresh, name="elastune-live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=5.0)
            _try_show(view, fetch)
            for logger, old, new in handlers:
                logger.removeHandler(new)
                for handler in old:
                    logger.addHandler(handler)


def _try_show(view: LiveView, fetch: Callable[[], Mapping[str, Any]]) -> None:
    try:
        view.show(fetch())
    except Exception as error:
        # A display that cannot be refreshed must not end the sweep; the next look may succeed.
        logging.getLogger(__name__).debug("view not refreshed: %s", error)


def _logs_above(console: Console) -> list[tuple[logging.Logger, list[logging.Handler], logging.Handler]]:
    """Route the stream handlers of Optuna's logger through the live console for the time being."""
    logger = logging.getLogger("optuna")
    old = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    if not old:
        return []
    new = RichHandler(console=console, show_path=False, show_level=False, markup=False)
    for handler in old:
        logger.removeHandler(handler)
    logger.addHandler(new)
    return [(logger, list(old), new)]


def print_trials(overview: Mapping[str, Any]) -> None:
    """`elastune ls`."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("trial", "study", "number", "state", "replicas", "step", "value"):
        # Names are copied from here, so they stay whole; the reason takes what is left.
        table.add_column(column, no_wrap=True, overflow="ignore")
    table.add_column("why")
    for trial in overview["trials"]:
        latest = trial.get("latest") or {}
        cells = (
            trial["trial_id"],
            trial["study"],
            str(trial["number"]),
            trial["state"],
            str(trial["replicas"]),
            _number(latest.get("step"), "{:d}"),
            _number(latest.get("value"), "{:.4f}"),
            _because(trial["reason"]),
        )
        table.add_row(*map(_plain, cells))
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(table)
    _print_emulated(console, overview)


def _print_emulated(console: Console, answer: Mapping[str, Any]) -> None:
    if answer.get("emulated"):
        console.print(_plain(answer["emulated"], style="dim"))


def print_why(answer: Mapping[str, Any]) -> None:
    """`elastune why TRIAL`."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    trial, grant = answer["trial"], answer["grant"]
    console.print(_plain(f"{_heading(trial)}, holds {answer['held_slots']} slots"))
    if answer["policy_error"] is not None:
        console.print(_plain(f"the policy's last answer could not be used, allocations stay: {answer['policy_error']}"))
    if grant is None:
        console.print(_plain(f"why: {_because(trial['reason'])}"))
    else:
        where = ", ".join(f"{count} on {node}" for node, count in grant["placement"].items()) or "none"
        console.print(_plain(f"policy {answer['policy']} grants: {where}"))
        console.print(_plain(f"why: {_because(grant['reason'])}"))
        for name, value in grant["numbers"].items():
            console.print(_plain(f"  {name}: {value:.4g}"))
    for change in answer["changes"]:
        when = time.strftime("%H:%M:%S", time.localtime(change["at"]))
        console.print(_plain(f"{when} {change['what']}: {change['reason']['sentence']}"))
    _print_emulated(console, answer)


def print_trial(trial: Mapping[str, Any]) -> None:
    """`elastune show TRIAL`."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(_plain(_heading(trial)))
    console.print(_plain(f"why: {_because(trial['reason'])}"))
    if trial["outcome"] is not None and trial["outcome"]["traceback"]:
        console.print(Text(indent(printable(trial["outcome"]["traceback"]), "  ")))
    history = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("when", "who", "what", "why"):
        history.add_column(column)
    for entry in trial["history"]:
        when = time.strftime("%H:%M:%S", time.localtime(entry["at"]))
        history.add_row(*map(_plain, (when, entry["who"], entry["what"], _because(entry["reason"]))))
    console.print(history)
    replicas = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("replica", "node", "slot", "state", "pid", "exit status"):
        replicas.add_column(column)
    for replica in trial["replicas"]:
        status = "-" if replica["exit_status"] is None else str(replica["exit_status"])
        place = (replica["replica_id"], replica["node"], str(replica["slot"]))
        replicas.add_row(*map(_plain, (*place, replica["state"], str(replica["pid"]), status)))
    console.print(replicas)
    _print_emulated(console, trial)
