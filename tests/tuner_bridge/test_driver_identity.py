"""A driver of this machine that was killed is known to be gone; any other one may still be there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tuner_bridge.driving.study_driver import driver_identity, has_ended

TELLS = "from tuner_bridge.driving.study_driver import driver_identity; print(driver_identity(), flush=True); input()"


def test_a_process_that_was_killed_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", TELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        told = other.stdout.readline().decode().strip()
        assert not has_ended(told)
        other.kill()
        # Nobody has asked for its end yet.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(told)
        other.wait()
        assert has_ended(told)


def test_a_number_that_another_process_has_now_is_another() -> None:
    machine, pid, began, mark = driver_identity().split("-")
    assert not has_ended(f"{machine}-{pid}-{began}-{mark}")
    assert has_ended(f"{machine}-{pid}-{int(began) - 60}-{mark}")


def test_of_others_it_is_not_known() -> None:
    _, pid, began, mark = driver_identity().split("-")
    for told in (f"0000000000000000-{pid}-{int(began) - 60}-{mark}", "4711-abcdef", "", "a-b-c-d"):
        assert not has_ended(told)


def test_where_the_machine_does_not_tell_nobody_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise OSError(f"no {path}")

    monkeypatch.setattr(os, "readlink", refuse)
    machine, _, began, mark = driver_identity().split("-")
    assert not has_ended(f"{machine}-4194304-{began}-{mark}"), "there is no such process"


def test_each_one_is_another_and_fits() -> None:
    first, second = driver_identity(), driver_identity()
    assert first != second
    assert max(map(len, (first, second))) <= 64
