"""Slots that stand for other devices."""

from __future__ import annotations

import pytest

from dist_core.link.environment import emulated_profile
from trials.launch import LocalLauncher
from trials.launch.emulated import emulated_slots, emulation


def test_nodes_and_slots_are_those_that_were_asked_for() -> None:
    devices = emulation("2x3:bert-squad@10")
    launcher = LocalLauncher(slots=emulated_slots(devices), fork_server=False)
    assert [(node.node, node.slots) for node in launcher.nodes()] == [("emulated-0", 3), ("emulated-1", 3)]
    environ = launcher.slot_environ("emulated-1", 2)
    assert emulated_profile(environ) == devices.profile
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert devices.sentence == "devices are emulated: 2 nodes of 3 slots, steps take as long as bert-squad@10 says"
    assert emulated_profile({}) is None


def test_slots_may_be_given_beside_a_profile() -> None:
    devices = emulation("resnet50-imagenet", slots=5)
    assert (devices.nodes, devices.slots_per_node, devices.profile.name) == (1, 5, "resnet50-imagenet")


@pytest.mark.parametrize(
    ("text", "slots", "match"),
    [
        ("resnet50-imagenet", None, "they must have the form NODESxSLOTS"),
        ("4:resnet50-imagenet", 4, "they must have the form NODESxSLOTS"),
        ("4x8", 4, "leave one out"),
        ("0x8", None, "0 slots; it must be 1 to 1024"),
        ("100x100", None, "10000 slots; it must be 1 to 1024"),
        ("4x8:alexnet", None, "'alexnet' is not a speed profile; choose one of resnet18-cifar10"),
    ],
)
def test_other_texts_are_refused(text: str, slots: int | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        emulation(text, slots=slots)
