"""Which addresses others can call, and what is said of those."""

from __future__ import annotations

import pytest

from scheduler.host.hosts import is_loopback, open_host_warning, reachable


@pytest.mark.parametrize(
    ("host", "loopback", "own_way"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("127.0.0.9", True, "127.0.0.9"),
        ("localhost", True, "localhost"),
        ("0.0.0.0", False, "127.0.0.1"),
        ("10.1.2.3", False, "10.1.2.3"),
        ("gpu-box", False, "gpu-box"),
    ],
)
def test_who_can_call(host: str, loopback: bool, own_way: str) -> None:
    assert is_loopback(host) == loopback
    assert reachable(host) == own_way


def test_an_open_address_is_said_to_be_open() -> None:
    assert "all networks" in open_host_warning("0.0.0.0")
    assert "10.1.2.3" in open_host_warning("10.1.2.3")
    for words in ("not encrypted", "ssh -L", "https://", "elastune token STUDY"):
        assert words in open_host_warning("0.0.0.0")
