"""A sweep's own scheduler: killed while it starts, and words of one that cannot start."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from scheduler.errors import SchedulerDidNotStart
from scheduler.host.embedded import EmbeddedScheduler
from tests.support.waiting import until


def test_one_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    embedded = EmbeddedScheduler(tmp_path / "state", slots=1, fork_server=False)
    killed: list[int] = []

    def kill_the_first() -> None:
        killed.append(until(lambda: embedded.pid))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    client = embedded.start()
    killer.join()
    client.check()
    assert embedded.pid not in killed
    client.close()
    embedded.stop()


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "trials.db").write_text("this is no database at all, whatever its name says" * 20)
    embedded = EmbeddedScheduler(tmp_path / "state", slots=1, fork_server=False)
    with pytest.raises(SchedulerDidNotStart, match=r"trials\.db cannot be opened: file is not a database"):
        embedded.start()
