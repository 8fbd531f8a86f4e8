"""``adaptdl.torch.accumulator``: sums over all replicas; those of an earlier run are there from the start."""

from __future__ import annotations

from typing import Any

import dist_core.training.accumulator
from dist_core.adaptdl.env import core_of_job


class Accumulator(dist_core.training.accumulator.Accumulator):
    def __init__(self, *arguments: Any, **initial: float) -> None:
        core_of_job()
        super().__init__(*arguments, **initial)
