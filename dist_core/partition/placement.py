"""On which device of a pipeline a stage lies: in rounds over all of them, or there and back, in a V."""

from __future__ import annotations


def device_of(stage: int, devices: int, *, in_v: bool) -> int:
    rounds, place = divmod(stage, devices)
    return devices - 1 - place if in_v and rounds else place


def stages_on(device: int, devices: int, chunks: int, *, in_v: bool) -> list[int]:
    """``chunks``: stages of each device; in a V each has two, a stage and its mirror."""
    if in_v:
        return [device, 2 * devices - 1 - device]
    return list(range(device, devices * chunks, devices))
