from __future__ import annotations

from typing import Any

import pytest

from scheduler.embedded import EmbeddedScheduler


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One scheduler for all sweeps of a file, joined through ELASTUNE_URL."""
    embedded = EmbeddedScheduler(tmp_path_factory.mktemp("scheduler"), slots=2)
    client = embedded.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTUNE_URL", client.url)
        patch.setenv("ELASTUNE_TOKEN", client.token)
        yield client
    client.close()
    embedded.stop()
