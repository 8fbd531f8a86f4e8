"""The trial that a pod belongs to, as its resource tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Owner:
    """The trial that a pod belongs to."""

    trial_id: str
    name: str
    namespace: str
    uid: str
    study: str
    templates: Sequence[Mapping[str, Any]] = ()
    """Pod templates, the study's and then the trial's: each adds to the one before."""
    image: str = ""
    preemptible: bool = True
    queue: str = ""
    """Kueue's local queue, where it is installed."""
