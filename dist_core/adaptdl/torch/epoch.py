"""``adaptdl.torch.epoch``: the epoch loop; what an earlier run has completed is known before it."""

from __future__ import annotations

from collections.abc import Iterator

from dist_core.adaptdl.env import core_of_job
from dist_core.training import api


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    core_of_job()
    return api.remaining_epochs_until(num_epochs)


def current_epoch() -> int | None:
    """Return the epoch being trained, None outside of ``remaining_epochs_until``."""
    core_of_job()
    return api.current_epoch()


def finished_epochs() -> int:
    """Return the number of epochs that the job has completed, earlier runs included."""
    core_of_job()
    return api.finished_epochs()
