"""OwnSlots: what the slots of a sweep's own scheduler are to be, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from tuner_bridge.errors import InvalidSweep

LEAST_MEMORY, MOST_GPUS = 0.1, 64
"""As `elastune up` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """None where the machine decides. Raises InvalidSweep for what cannot be."""

    slots: int | None
    emulate: str | None
    memory_per_slot: float | None
    """GiB."""
    gpus_per_slot: int | None

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise InvalidSweep(f"slots is {self.slots}; it must be at least 1")
        if self.gpus_per_slot is not None and not 1 <= self.gpus_per_slot <= MOST_GPUS:
            raise InvalidSweep(f"gpus_per_slot is {self.gpus_per_slot}; it must be from 1 to {MOST_GPUS}")
        memory = self.memory_per_slot
        if memory is not None and not (math.isfinite(memory) and memory >= LEAST_MEMORY):
            raise InvalidSweep(f"memory_per_slot is {memory}; it must be a number of GiB of at least {LEAST_MEMORY}")
        if self.emulate is not None:
            from trials.launch.emulated import emulation

            try:
                emulation(self.emulate, slots=self.slots)
            except ValueError as error:
                raise InvalidSweep(str(error)) from error

    def refuse_beside(self, scheduler: str) -> None:
        """Raise InvalidSweep if slots were asked for and another scheduler has slots of its own."""
        for name, value in asdict(self).items():
            if value is not None:
                raise InvalidSweep(
                    f"{name}={value!r} was given, but {scheduler} names a scheduler that has its own slots; leave one "
                    "out"
                )
