"""The sweep in the terminal: progress, slots, running trials, and why sizes changed."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scheduler.client.background import repeating
from scheduler.dashboard.colors import Names
from scheduler.dashboard.lines import WIDE
from trials.plain_words import one_line

WAITING = ("pending", "paused")
REFRESH_SECONDS = 0.25

CHANGES_SHOWN = 5


def sweep_view(overview: Mapping[str, Any], *, title: str = "", total: int | None = None) -> RenderableType:
    """Draw one frame, as a pure function of the API's overview."""
    trials, names = overview["trials"], _names(overview)
    parts: list[RenderableType] = [*_progress(overview, title, total), _slots(overview, names), _running(trials, names)]
    if overview.get("emulated"):
        parts.append(_plain(overview["emulated"], style="dim"))
    changes = overview.get("changes", [])[-CHANGES_SHOWN:]
    if changes:
        parts.append(_changes(changes, names))
    return Group(*parts)


def _names(overview: Mapping[str, Any]) -> Names:
    return Names([*overview["trials"], *overview.get("named", ())], overview.get("studies", ()))


def _progress(overview: Mapping[str, Any], title: str, total: int | None) -> Iterator[RenderableType]:
    """Yield one bar a sweep; without a title one for each study that is not over."""
    alive = Counter(trial.get("study", "") for trial in overview["trials"])
    over: dict[str, dict[str, int]] = overview.get("over", {})
    if title or len(alive.keys() | over.keys()) < 2:
        together = sum((Counter(each) for each in over.values()), Counter())
        yield _bar(alive.total(), together, title, total)
        return
    titles = {study["name"]: study.get("title") or study["name"] for study in overview.get("studies", ())}
    for name, count in alive.items():
        yield _bar(count, over.get(name, {}), titles.get(name, name), None)


def _bar(alive: int, over: Mapping[str, int], title: str, total: int | None) -> RenderableType:
    """Draw a study's bar; ``over``: how many trials ended how."""
    done = sum(over.values())
    of = total if total is not None else alive + done
    grid = Table.grid(padding=(0, 1))
    words = f"{done}/{of} trials"
    for state in ("pruned", "failed"):
        if over.get(state):
            words += f", {over[state]} {state}"
    grid.add_row(_plain(title, style="bold"), ProgressBar(total=max(of, 1), completed=done, width=40), words)
    return grid


def _slots(overview: Mapping[str, Any], names: Names) -> RenderableType:
    total = sum(node["slots"] for node in overview["nodes"])
    line = Text("slots ")
    used = 0
    for trial in overview["trials"]:
        for _ in range(trial.get("slots") or 0):
            line.append("■ ", style=names.color(trial.get("trial_id", str(trial["number"]))))
            used += 1
    others = max(0, overview.get("held_slots", used) - used)
    line.append("▨ " * others, style="dim")
    line.append("□ " * max(0, total - used - others), style="dim")
    line.append(f" {used} of {total} in use" + (f", {others} by others" if others else ""))
    return line


def _running(trials: list[dict[str, Any]], names: Names) -> RenderableType:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("trial", "state", "replicas", "batch", "goodput/s", "promise", "step", "value", "done", "why"):
        left = column in ("trial", "state", "why")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "why", overflow="ellipsis")
    for trial in trials:
        latest = trial.get("latest") or {}
        share = trial.get("share_done")
        own = trial.get("trial_id", str(trial["number"]))
        table.add_row(
            Text(names.label(own), style=names.color(own)),
            _plain(trial["state"]),
            _replicas(trial),
            _number(trial.get("batch"), "{:d}"),
            _number(trial.get("goodput"), "{:.0f}"),
            _number(trial.get("promise"), "{:.2f}"),
            _number(latest.get("step"), "{:d}"),
            _number(latest.get("value"), "{:.4f}"),
            _number(share, "{:.0%}"),
            _plain(trial["reason"]["sentence"] if trial["state"] in WAITING and "reason" in trial else "", style="dim"),
        )
    return table


def _replicas(trial: Mapping[str, Any]) -> str:
    """Return replicas of most replicas, with slots each where that is more than one, or was chosen."""
    size = trial.get("slots_per_replica", 1)
    layout = trial.get("layout") or str(size)
    return f"{trial['replicas']}/{trial['max_replicas']}" + (f" x{layout}" if layout != "1" else "")


def _changes(changes: list[dict[str, Any]], names: Names) -> RenderableType:
    lines = Table.grid(padding=(0, 1))
    for change in changes:
        trial_id = change["trial_id"]
        if trial_id not in names:
            continue
        lines.add_row(
            Text(f"trial {names.label(trial_id)}", style=names.color(trial_id)),
            _plain(change["what"]),
            _plain(names.within(change["reason"]["sentence"]), style="dim"),
        )
    return lines


def _plain(words: str, style: str = "") -> Text:
    """Return a user's text as it is, without markup and control characters."""
    return Text(one_line(words), style=style)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


class LiveView:
    """A frame that is redrawn in place; without a terminal it prints changes of size as lines."""

    def __init__(self, *, title: str = "", total: int | None = None) -> None:
        # What looks once does without it.
        from rich.live import Live

        self._console = Console(stderr=False)
        self._live = Live(console=self._console, refresh_per_second=1 / REFRESH_SECONDS, transient=False)
        self._title = title
        self._total = total
        self._printed = 0

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def console(self) -> Console:
        return self._console

    def show(self, overview: Mapping[str, Any]) -> None:
        if self._console.is_terminal:
            self._live.update(sweep_view(overview, title=self._title, total=self._total))
            return
        names, changes = _names(overview), overview.get("changes", [])
        fresh = overview.get("num_changes", len(changes)) - self._printed
        for change in changes[-fresh:] if fresh > 0 else ():
            sentence = names.within(change["reason"]["sentence"])
            print(one_line(f"trial {names.label(change['trial_id'])}: {change['what']}: {sentence}"), flush=True)
        self._printed += max(0, fresh)


@contextmanager
def show_while(fetch: Callable[[], Mapping[str, Any]], *, title: str, total: int | None) -> Iterator[None]:
    """Keep a live view up to date in the background; log lines (Optuna's) appear above it."""
    with LiveView(title=title, total=total) as view:
        handlers = _logs_above(view.console) if view.console.is_terminal else []
        try:
            with repeating(lambda: _try_show(view, fetch), REFRESH_SECONDS, name="elastune-live", patience=5.0):
                yield
        finally:
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
    from rich.logging import RichHandler

    new = RichHandler(console=console, show_path=False, show_level=False, markup=False)
    for handler in old:
        logger.removeHandler(handler)
    logger.addHandler(new)
    return [(logger, list(old), new)]


def print_view(overview: Mapping[str, Any]) -> None:
    """Print what `elastune top --once` shows."""
    Console(width=None if sys.stdout.isatty() else WIDE).print(sweep_view(overview))
