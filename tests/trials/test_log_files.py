"""Replicas' logs: their last words, and a limit to their size while somebody still writes."""

from __future__ import annotations

import os
from pathlib import Path

from trials.log_files import LONGEST_WORDS, following, last_words, shorten


def test_last_words_are_the_last_line_that_is_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_bytes(b"first\n" + b"x" * 5000 + b"\nValueError: \xff on purpose\n\n  \n")
    assert last_words(log) == "ValueError: \N{REPLACEMENT CHARACTER} on purpose"
    log.write_text("y" * 1000)
    assert last_words(log) == "y" * LONGEST_WORDS


def test_a_long_log_keeps_its_later_half_and_goes_on_growing_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(1000):
        os.write(writer, b"line %d\n" % number)
    assert not shorten(log, 1_000_000)
    assert shorten(log, 4000)
    os.write(writer, b"the end\n")
    os.close(writer)
    lines = log.read_text().splitlines()
    assert lines[0] == "(earlier lines were dropped)"
    assert lines[-2:] == ["line 999", "the end"]
    assert [int(line.split()[1]) for line in lines[1:-1]] == list(range(1000 - len(lines) + 2, 1000))
    assert os.path.getsize(log) < 2100


def test_what_a_replica_put_in_its_logs_place_is_not_read(tmp_path: Path) -> None:
    """Through a link it would have the scheduler read and shorten files that the replica cannot reach."""
    secret, log, pipe = tmp_path / "secret", tmp_path / "log", tmp_path / "pipe"
    secret.write_text("a token\n" * 1000)
    log.symlink_to(secret)
    os.mkfifo(pipe)
    for there in (log, pipe):
        assert (last_words(there), following(there, -1, 100)[0], shorten(there, 10)) == ("", "", False)
    assert len(secret.read_text()) == 8000


def test_a_log_that_is_not_there_is_left_alone(tmp_path: Path) -> None:
    assert not shorten(tmp_path / "none")
