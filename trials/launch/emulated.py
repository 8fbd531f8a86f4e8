"""Slots that stand for devices which are not there: replicas are real, their steps take as long as a profile says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dist_core.goodput.speed_profiles import SpeedProfile, speed_profile
from trials.launch.slots import Slot

DEFAULT_PROFILE = "resnet18-cifar10"
MOST_SLOTS = 1024
FORM = "NODESxSLOTS, NODESxSLOTS:PROFILE or NODESxSLOTS:PROFILE@FACTOR, such as 4x8:resnet50-imagenet@10"


@dataclass(frozen=True, slots=True)
class Emulation:
    nodes: int
    slots_per_node: int
    profile: SpeedProfile

    @property
    def sentence(self) -> str:
        """Return a sentence for people who see what ran on it."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        slots = "1 slot" if self.slots_per_node == 1 else f"{self.slots_per_node} slots"
        return f"devices are emulated: {nodes} of {slots}, steps take as long as {self.profile.name} says"


def emulation(text: str, *, slots: int | None = None) -> Emulation:
    """Parse the form that users write. ``slots``: one node of so many, for a text that names a profile only.

    Raises ValueError for anything else.
    """
    shape, _, profile = text.partition(":")
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    if match is None:
        if slots is None or ":" in text:
            raise ValueError(f"emulated devices are {text!r}; they must have the form {FORM}")
        return Emulation(1, slots, speed_profile(text))
    if slots is not None:
        raise ValueError(
            f"slots is {slots}, but emulated devices {text!r} also say how many slots there are; leave one out"
        )
    nodes, slots_per_node = int(match[1]), int(match[2])
    if not 1 <= nodes * slots_per_node <= MOST_SLOTS:
        raise ValueError(
            f"emulated devices are {text!r}, which is {nodes * slots_per_node} slots; it must be 1 to {MOST_SLOTS}"
        )
    return Emulation(nodes, slots_per_node, speed_profile(profile or DEFAULT_PROFILE))


def emulated_slots(devices: Emulation) -> tuple[Slot, ...]:
    profile = devices.profile.to_text()
    names = [f"emulated-{index}" for index in range(devices.nodes)]
    return tuple(Slot(node=name, emulates=profile) for name in names for _ in range(devices.slots_per_node))
