"""Who held which slots over time, one colour a trial, as cluster traces are usually drawn: a PNG and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.dashboard.colors import Names


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
    note: str


def bars(timeline: Mapping[str, Any]) -> tuple[list[str], list[Bar]]:
    """Rows (slots, top to bottom) and bars of the picture; pure."""
    rows = [f"{node['name']} / {slot}" for node in timeline["nodes"] for slot in range(node["slots"])]
    trials = {trial["trial_id"]: trial for trial in timeline["trials"]}
    names = Names(timeline["trials"], timeline.get("studies", ()))
    intervals = timeline["intervals"]
    if not intervals:
        return rows, []
    start = min(interval["began"] for interval in intervals)
    drawn = []
    for interval in intervals:
        trial = trials[interval["trial_id"]]
        ended = timeline["now"] if interval["ended"] is None else interval["ended"]
        drawn.append(
            Bar(
                row=f"{interval['node']} / {interval['slot']}",
                trial_id=interval["trial_id"],
                label=names.label(interval["trial_id"]),
                color=names.color(interval["trial_id"]),
                began=interval["began"] - start,
                ended=ended - start,
                note=f"{trial['state']}: {trial['reason']['sentence']}",
            )
        )
    return rows, drawn


def draw_timeline(timeline: Mapping[str, Any], base: Path) -> list[Path]:
    """Write ``BASE.png`` and ``BASE.html``; returns their paths. Raises OSError when the folder cannot be written."""
    base.parent.mkdir(parents=True, exist_ok=True)
    rows, drawn = bars(timeline)
    png, html = base.with_suffix(".png"), base.with_suffix(".html")
    title = "Slots over time (numbers are trials)"
    if timeline.get("emulated"):
        title += f"; {timeline['emulated']}"
    _draw_png(rows, drawn, title, png)
    _draw_html(rows, drawn, title, html)
    return [png, html]


def _draw_png(rows: list[str], drawn: list[Bar], title: str, path: Path) -> None:
    import matplotlib

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


def _draw_html(rows: list[str], drawn: list[Bar], title: str, path: Path) -> None:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for trial_id in dict.fromkeys(bar.trial_id for bar in drawn):
        mine = [bar for bar in drawn if bar.trial_id == trial_id]
        label = mine[0].label
        figure.add_bar(
            y=[bar.row for bar in mine],
            x=[bar.ended - bar.began for bar in mine],
            base=[bar.began for bar in mine],
            orientation="h",
            name=f"trial {label}",
            marker={"color": mine[0].color, "line": {"color": "white", "width": 1}},
            text=[label] * len(mine),
            textposition="inside",
            hovertext=[f"trial {label} ({bar.trial_id})<br>{bar.note}" for bar in mine],
            hoverinfo="text+x",
        )
    figure.update_layout(
        barmode="overlay",
        title=title,
        xaxis_title="seconds",
        yaxis={"categoryorder": "array", "categoryarray": list(reversed(rows))},
        template="plotly_white",
    )
    figure.write_html(path, include_plotlyjs=True)
