"""Fixtures of more than one file."""

from __future__ import annotations

import pytest

from tests.support.fake_cluster import FakeClusterApi


@pytest.fixture
def api() -> FakeClusterApi:
    return FakeClusterApi()
