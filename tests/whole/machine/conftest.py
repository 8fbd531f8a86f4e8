"""What the tests of training on this machine share; which launcher their replicas come from each file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import Rig
from trials.launch import LocalLauncher


@pytest.fixture
def rig(tmp_path: Path, launcher: LocalLauncher) -> Iterator[Rig]:
    made = Rig(tmp_path, launcher=launcher)
    yield made
    made.close()
