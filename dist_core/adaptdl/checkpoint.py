"""``adaptdl.checkpoint``: states of the script's own that save to and load from a file object."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import torch

from dist_core.adaptdl.env import core_of_job, replica_rank


class State:
    """Derive from it and override ``save`` and ``load``. Raises InvalidTraining for a name that is taken."""

    def __init__(self, name: str) -> None:
        self._loaded = False
        self._name = f"user-{name}"
        core_of_job().registry.register(self._name, self)

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state."""

    def load(self, fileobj: BinaryIO) -> None:
        """Read what ``save`` wrote."""

    def sync(self) -> None:
        """Prepare on the saving replica, before ``save``."""

    def state_dict(self) -> dict[str, Any]:
        self.sync()
        buffer = io.BytesIO()
        self.save(buffer)
        return {"content": torch.frombuffer(bytearray(buffer.getvalue() or b"\0"), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Subclasses set their attributes up after this class's constructor: loading waits for load_state.
        self._content: torch.Tensor | None = state["content"]
        if self._loaded:
            self._load_content()

    def _load_content(self) -> bool:
        content = getattr(self, "_content", None)
        self._content = None
        if content is None:
            return False
        self.load(io.BytesIO(content.cpu().numpy().tobytes()))
        return True


def load_state(state: State) -> bool:
    """Load what an earlier run or another replica saved under the state's name; False when there is nothing."""
    state._loaded = True
    return state._load_content()


def save_all_states() -> None:
    """Write a checkpoint now, and wait until it is on disk."""
    core = core_of_job()
    if replica_rank() == 0:
        core.saving.save(leaving=False, wait=True)
