"""Tables for the command line: a line a row, as wide as they need to be, and nothing that takes time to load."""

from __future__ import annotations

import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trials.plain_words import one_line

Row = TypeVar("Row")
WIDE = 240
"""Characters of a line that is read by no terminal."""
STATE_COLORS = {
    "running": "36",
    "rescaling": "36",
    "starting": "33",
    "pending": "33",
    "paused": "33",
    "succeeded": "32",
    "failed": "31",
    "pruned": "2",
    "cancelled": "2",
}


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    name: str
    cell: Callable[[Row], Any]
    right: bool = False
    color: Callable[[Row], str] | None = None
    """SGR colour, such as ``31``."""


def table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], *, width: int | None = None, colored: bool = False
) -> str:
    """Draw a table whose last column is cut where the line would be wider; None: it is not cut."""
    cells = [[one_line(str(shown(column.cell(row)))) for column in columns] for row in rows]
    heads = [column.name for column in columns]
    widths = [max(_width(text) for text in texts) for texts in zip(heads, *cells, strict=True)]
    lines = [_line(columns, heads, widths, width, ["1" if colored else ""] * len(columns))]
    # Of thousands of lines most are plain ones: letters of one width, in no colour, none too long.
    plain = "  ".join(f"{{:{'>' if each.right else '<'}{own}}}" for each, own in zip(columns, widths, strict=True))
    is_narrow = width is None or sum(widths) + 2 * len(widths) <= width
    for row, texts in zip(rows, cells, strict=True):
        if is_narrow and not colored and all(map(str.isascii, texts)):
            lines.append(plain.format(*texts).rstrip())
            continue
        colors = [column.color(row) if colored and column.color is not None else "" for column in columns]
        lines.append(_line(columns, texts, widths, width, colors))
    return "\n".join(lines)


def print_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    is_terminal = sys.stdout.isatty()
    print(table(columns, rows, width=shutil.get_terminal_size().columns if is_terminal else WIDE, colored=is_terminal))


def shown(value: Any) -> str:
    """Return a cell: nothing for None, numbers with four digits that count."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole / 3600:.1f} h" if whole < 172800 else f"{whole / 86400:.1f} d"


def clock(at: float) -> str:
    """Return the time of day here, or the date if it is another day."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def _line(
    columns: Sequence[Column[Row]],
    texts: Sequence[str],
    widths: Sequence[int],
    width: int | None,
    colors: Sequence[str],
) -> str:
    parts: list[str] = []
    used = 0
    for index, (column, text, own) in enumerate(zip(columns, texts, widths, strict=True)):
        last = index == len(columns) - 1
        if last and width is not None:
            text = _cut(text, max(8, width - used))
        gap = " " * (own - _width(text))
        padded = gap + text if column.right else text if last else text + gap
        parts.append(f"\x1b[{colors[index]}m{padded}\x1b[0m" if colors[index] else padded)
        used += own + 2
    return "  ".join(parts).rstrip()


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    kept, used = [], 0
    for letter in text:
        used += _width(letter)
        if used > width - 1:
            break
        kept.append(letter)
    return "".join(kept) + "…"


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )
