"""Picture of who held which slots over time, one colour a trial, as cluster traces are usually drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.dashboard.colors import Names
from scheduler.errors import SchedulerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A slot held without interruption by one replica; times in seconds from the beginning of the picture."""

    row: str
    trial_id: str
    label: str
    """``3``, or ``alpha/3`` where there are several studies."""
    color: str
    began: float
    ended: float


def bars(timeline: Mapping[str, Any]) -> tuple[list[str], list[Bar]]:
    """Rows (slots, top to bottom) and bars of the picture; pure."""
    rows = [f"{node['name']} / {slot}" for node in timeline["nodes"] for slot in range(node["slots"])]
    names = Names(timeline["trials"], timeline.get("studies", ()))
    intervals = timeline["intervals"]
    if not intervals:
        return rows, []
    start = min(interval["began"] for interval in intervals)
    drawn = []
    for interval in intervals:
        ended = timeline["now"] if interval["ended"] is None else interval["ended"]
        drawn.append(
            Bar(
                row=f"{interval['node']} / {interval['slot']}",
                trial_id=interval["trial_id"],
                label=names.label(interval["trial_id"]),
                color=names.color(interval["trial_id"]),
                began=interval["began"] - start,
                ended=ended - start,
            )
        )
    return rows, drawn


def draw_timeline(timeline: Mapping[str, Any], base: Path) -> Path:
    """Write ``BASE.png`` and return its path.

    Raises OSError when the folder cannot be written, and SchedulerError where matplotlib is missing.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    rows, drawn = bars(timeline)
    title = "Slots over time (numbers are trials)"
    if timeline.get("emulated"):
        title += f"; {timeline['emulated']}"
    path = base.with_suffix(".png")
    _draw(rows, drawn, title, path)
    return path


NEEDED = "pictures need matplotlib, which is not installed here; pip install 'elastune[pictures]'"


def _draw(rows: list[str], drawn: list[Bar], title: str, path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SchedulerError(NEEDED) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(14, 1.6 + 0.55 * max(len(rows), 3)), dpi=110)
    position = {row: index for index, row in enumerate(rows)}
    length = max((bar.ended for bar in drawn), default=1.0)
    for bar in drawn:
        axes.barh(
            position[bar.row],
            bar.ended - bar.began,
            left=bar.began,
            height=0.92,
            color=bar.color,
            edgecolor="white",
            linewidth=0.8,
        )
        if bar.ended - bar.began > 0.012 * length:
            axes.text(
                (bar.began + bar.ended) / 2,
                position[bar.row],
                bar.label,
                ha="center",
                va="center",
                color="white",
                fontsize=9,
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
