"""Words of others (names, errors, logs) as a terminal and a log may have them: nothing in them is obeyed.

A replica says what it likes. Escape sequences would move the cursor, set titles and fill clipboards, and a newline
would write a line of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS and the like, up to their end
    r"|\x9b[0-?]*[ -/]*[@-~]"
    r"|[\x90\x9d\x98\x9e\x9f][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters without width or that change the order of reading, and halves of pairs, which no stream can write."""


def printable(words: str) -> str:
    """Return the text with its lines and tabs, without escape sequences; of a bar that was redrawn, its last state."""
    lines = (_last_state(line) for line in _SEQUENCES.sub("", words).split("\n"))
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", "\n".join(lines))


def _last_state(line: str) -> str:
    """Return what is left to read of a line that was overwritten by carriage returns."""
    return next((state for state in reversed(line.split("\r")) if state), "")


def one_line(words: str) -> str:
    """Return the text as one line: line ends and tabs are shown as such."""
    if words.isascii() and words.isprintable():
        return words
    return printable(words).replace("\n", "\\n").replace("\t", "\\t")


def told_apart(titles: Mapping[str, str]) -> dict[str, str]:
    """Return each study's title, or its own name where another one has that title."""
    shared = Counter(titles.values())
    return {name: title if shared[title] < 2 else name for name, title in titles.items()}
