"""Looped: what the loops over a loader ask of it."""

from __future__ import annotations

from typing import Any, Protocol

from dist_core.trial.participants import PacingLoader


class Looped(PacingLoader, Protocol):
    source: Any
    """Source of its samples, in their order."""
    drop_last: bool
    autoscaled: bool
    name: str | None
    """Name of its cursor among the trial's states, once it has trained."""

    @property
    def batch_size(self) -> int: ...

    @property
    def current_batch_size(self) -> int: ...

    def settle_order(self) -> None:
        """Take the order that all replicas agree on, before the loader first trains."""
        ...

    def batches_of_pass(self) -> int:
        """Batches a pass takes at the present batch size. Raises TypeError when nobody knows."""
        ...
