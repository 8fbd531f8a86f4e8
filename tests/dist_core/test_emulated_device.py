"""Passes of emulated devices take as long as their profile says, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_core.goodput import ThroughputParams, optim_seconds
from dist_core.goodput.speed_profiles import PUBLISHED, SpeedProfile, speed_profile
from dist_core.trial.emulated_device import EmulatedDevice

PARAMS = ThroughputParams(0.1, 0.01, 0.4, 0.0, 0.2, 0.0, 1.0)


class Machine:
    """Time that passes when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.device = EmulatedDevice(PARAMS, self.said.append, clock=lambda: self.now, sleep=self.work)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def runs_a_pass(self, real: float, seconds: float) -> float:
        """What lies between the ends of two passes."""
        began = self.now
        self.work(real)
        self.device.hold(began, seconds)
        return self.now - began


def test_a_pass_takes_what_the_model_says() -> None:
    device = Machine().device
    assert device.pass_seconds(1, 1, 10, reduces=True) == pytest.approx(0.2)
    assert device.pass_seconds(1, 4, 10, reduces=False) == pytest.approx(0.2)
    assert device.pass_seconds(1, 4, 10, reduces=True) == pytest.approx(0.4)
    assert device.pass_seconds(2, 4, 10, reduces=True) == pytest.approx(0.6)


def test_what_lies_between_passes_is_no_extra_time_but_a_pause_is() -> None:
    machine = Machine()
    assert machine.runs_a_pass(0.05, 0.2) == pytest.approx(0.2)
    before = machine.now
    for _ in range(10):
        machine.work(0.02)
        began = machine.now
        machine.work(0.05)
        assert machine.device.hold(began, 0.2) == pytest.approx(0.2)
    assert machine.now - before == pytest.approx(10 * 0.2)
    machine.work(3.0)
    assert machine.runs_a_pass(0.05, 0.2) == pytest.approx(0.2)
    machine.device.entered(0, 2)
    machine.work(0.01)
    assert machine.runs_a_pass(0.05, 0.2) == pytest.approx(0.2)
    assert not machine.said


def test_a_machine_that_does_not_keep_up_shows_its_own_time_and_says_so_once() -> None:
    machine = Machine()
    for _ in range(120):
        assert machine.runs_a_pass(0.3, 0.2) == pytest.approx(0.3)
    assert len(machine.said) == 1
    assert "is too slow for the devices that it emulates" in machine.said[0]


def test_a_few_late_passes_are_nothing_to_tell() -> None:
    machine = Machine()
    for number in range(120):
        machine.runs_a_pass(0.3 if number % 10 == 0 else 0.1, 0.2)
    assert not machine.said


def test_profiles_come_by_name_from_a_file_and_at_another_speed(tmp_path: Path) -> None:
    whole = speed_profile("bert-squad")
    fast = speed_profile("bert-squad@4")
    assert fast.name == "bert-squad@4"
    assert optim_seconds(fast.params, 2, 5, 8) == pytest.approx(float(optim_seconds(whole.params, 2, 5, 8)) / 4)
    assert SpeedProfile.from_text(fast.to_text()) == fast
    file = tmp_path / "mine.json"
    names = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
    file.write_text(json.dumps(dict(zip(names, (0.1, 0.01, 0.4, 0.0, 0.2, 0.0, 1.0), strict=True))))
    assert speed_profile(str(file)) == SpeedProfile("mine", PARAMS)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("resnet", f"'resnet' is not a speed profile; choose one of {', '.join(PUBLISHED)}"),
        ("bert-squad@0", "must be a number above 0"),
        ("bert-squad@fast", "must be a number above 0"),
        ("bert-squad@nan", "must be a number above 0"),
        ("none.json", "none.json cannot be read"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        speed_profile(text)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{}", "has no 'alpha_c'"),
        ("[]", "has no 'alpha_c'"),
        ("{", "cannot be read"),
        (SpeedProfile("x", PARAMS).to_text().replace("0.01", "-1"), "at least 0"),
        (SpeedProfile("x", PARAMS).to_text().replace("0.01", '"slow"'), "could not convert"),
    ],
)
def test_a_file_that_holds_no_profile_is_refused(content: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=match):
        speed_profile(str(file))
