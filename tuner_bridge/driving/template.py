"""Template of a sweep's trials: which code they run, where, and on how many replicas."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dist_core.link.environment import SEED
from dist_core.state.seeds import derived_seed
from scheduler.client.carriers import Parts
from trials.inside.user_code import COMMAND_LINE
from trials.spec import TrialSpec
from tuner_bridge.errors import BridgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTemplate:
    entrypoint: str
    payload: Mapping[str, Any]
    """The same for all trials; what a trial has of its own is added."""
    min_replicas: int
    max_replicas: int
    replica_sizes: tuple[int, ...] = (1,)
    """Slots that a replica takes; several: those that the scheduler chooses from."""
    working_dir: str
    python_path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    """Digests of its pickled code and data."""
    contents: Mapping[str, bytes | Parts] = field(default_factory=dict)
    """Contents that these are digests of."""
    seed: str = ""
    """Text that the seeds of its trials follow from, with their numbers; empty: from their names."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that trials get of the sweep's environment, beside what their machine has."""

    @property
    def min_slots(self) -> int:
        return self.min_replicas * self.replica_sizes[0]

    def trial(self, study: str, number: int, **own: Any) -> TrialSpec:
        seed = {SEED: str(derived_seed("trial", self.seed, number))} if self.seed else {}
        return TrialSpec(
            study=study,
            number=number,
            entrypoint=self.entrypoint,
            payload={**self.payload, **own},
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            slots_per_replica=self.replica_sizes[0],
            replica_sizes=self.replica_sizes if len(self.replica_sizes) > 1 else (),
            working_dir=self.working_dir,
            python_path=self.python_path,
            preload=self.preload,
            code=self.code,
            environ={**seed, **self.environ, COMMAND_LINE: json.dumps(sys.argv)},
        )


def sizes_within(sizes: tuple[int, ...], min_replicas: int, slots: int, name: str = "min_replicas") -> tuple[int, ...]:
    """Return the sizes with which a trial could start on so many slots; raises BridgeError where there are none.

    ``name``: what whoever asked calls the minimum.
    """
    possible = tuple(size for size in sizes if min_replicas * size <= slots)
    if not possible:
        each = f" of {sizes[0]} slots each" if sizes[0] > 1 else ""
        raise BridgeError(
            f"{name} is {min_replicas}{each} but there are {slots} slots; no trial could ever start. Lower {name}, or "
            "add slots"
        )
    return possible


def own_python_path() -> tuple[str, ...]:
    """Folders this process imports from, for replicas that have to find the same modules."""
    return tuple(path for path in (os.path.abspath(entry) for entry in sys.path) if os.path.isdir(path))
