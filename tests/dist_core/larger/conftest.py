"""Models are divided among processes from a release of torch on."""

from __future__ import annotations

import pytest

from dist_core.torch_private import OLDEST_TO_DIVIDE, RELEASE


@pytest.fixture(autouse=True)
def torch_that_divides_models() -> None:
    if RELEASE < OLDEST_TO_DIVIDE:
        pytest.skip("this torch divides no models; tests/dist_core/test_old_torch.py has what is said then")
