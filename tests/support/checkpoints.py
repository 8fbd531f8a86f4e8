"""What a checkpoint writer has written."""

from __future__ import annotations

from typing import Any

from dist_core.state.checkpoint import CheckpointWriter, load_checkpoint
from dist_core.state.parts import newest_in_parts
from tests.support.waiting import until


def written_by(writer: CheckpointWriter) -> dict[str, Any]:
    """The newest state, once nothing is being written."""
    until(lambda: not writer.busy)
    found = newest_in_parts(writer.folder)
    assert found is not None
    return load_checkpoint(found[0][0])
