from __future__ import annotations

from tuner_bridge.driving.study_driver import PATIENCE_SECONDS, FirstWords


def test_each_reason_is_told_once_and_none_before_its_time() -> None:
    now, reasons, told = [100.0], ["waits for a slot"], list[str]()
    words = FirstWords(lambda: reasons[-1], told.append, clock=lambda: now[0])
    words.look()
    assert not told
    now[0] += PATIENCE_SECONDS
    words.look()
    words.look()
    assert told == ["elastune: the first trial has not begun yet: waits for a slot"]
    now[0] += PATIENCE_SECONDS
    words.look()
    assert len(told) == 1
    reasons.append("a replica could not be started: no such folder")
    now[0] += PATIENCE_SECONDS
    words.look()
    assert "no such folder" in told[1]
