"""The share of a core that looks at trials may cost, in virtual time."""

from __future__ import annotations

import pytest

from scheduler.loop.loop_thread import MOST_SAVED_SECONDS, SHARE, CpuBudget


def rests(looks: int, cpu: float, budget: CpuBudget, now: float) -> tuple[list[float], float]:
    """Of so many looks one after the other, each of which is over when its CPU time is; and the time after them."""
    found = []
    for _ in range(looks):
        now += cpu
        found.append(budget.rest_after(cpu, now))
        now += found[-1]
    return found, now


def test_a_few_looks_after_a_quiet_time_need_no_rest() -> None:
    assert sum(rests(20, 0.03, CpuBudget(100.0), 100.0)[0]) == 0.0


def test_in_the_long_run_the_share_is_kept() -> None:
    _, ended = rests(1000, 0.03, CpuBudget(100.0), 100.0)
    assert pytest.approx(SHARE * (ended - 100.0), rel=0.01) == 1000 * 0.03 - MOST_SAVED_SECONDS


def test_what_was_saved_has_a_limit() -> None:
    budget = CpuBudget(0.0)
    budget.rest_after(0.0, 1e6)
    assert budget.rest_after(MOST_SAVED_SECONDS + 0.1, 1e6) == pytest.approx(0.1 / SHARE)
