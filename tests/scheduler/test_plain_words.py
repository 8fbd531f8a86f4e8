"""Whatever a replica says, a terminal obeys none of it and a log keeps its lines."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.log_lines import PlainFormatter
from trials.plain_words import one_line, printable


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]52;c;Y2xpcA==\x1b\\after", "after"),
        ("\x9b2Jafter", "after"),
        ("\x1b[2Jgone", "gone"),
        ("10%\r20%\r", "20%"),
        ("bell\x07", "bell\N{REPLACEMENT CHARACTER}"),
        ("turned \u202eround", "turned \N{REPLACEMENT CHARACTER}round"),
        ("half \ud800", "half \N{REPLACEMENT CHARACTER}"),
        ("kept: [/data/x] größer 数\n\tline", "kept: [/data/x] größer 数\n\tline"),
        ("\x1b", ""),
    ],
)
def test_escape_sequences_are_dropped_and_words_are_kept(said: str, shown: str) -> None:
    assert printable(said) == shown


@given(
    st.text() | st.lists(st.sampled_from(["\x1b", "[", "]", "\x9d", "2", "J", "\r", "\n", "a", "\x07"])).map("".join)
)
def test_nothing_is_left_that_a_terminal_would_obey(said: str) -> None:
    shown = printable(said)
    assert not [letter for letter in shown if letter not in "\n\t" and (ord(letter) < 32 or 127 <= ord(letter) < 160)]
    assert printable(shown) == shown
    assert "\n" not in one_line(said)
    shown.encode()


def test_no_message_writes_a_second_line_into_the_log() -> None:
    formatter = PlainFormatter("%(levelname)s %(message)s")
    forged = "x\n2026 INFO scheduler: forged\x1b[2J"
    record = logging.LogRecord("n", logging.WARNING, __file__, 1, "failed error=%s", (forged,), None)
    assert formatter.format(record) == "WARNING failed error=x\\n2026 INFO scheduler: forged"


def test_no_line_of_a_traceback_can_be_taken_for_a_record() -> None:
    try:
        raise ValueError("x\nINFO forged")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("n", logging.ERROR, __file__, 1, "tick failed", (), info)
    lines = PlainFormatter("%(levelname)s %(message)s").format(record).splitlines()
    assert lines[0] == "ERROR tick failed"
    assert "  INFO forged" in lines
    assert all(line.startswith("  ") for line in lines[1:])
