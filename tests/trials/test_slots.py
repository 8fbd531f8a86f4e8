"""Dividing a machine into slots: GPUs, parts of them, cores, NUMA nodes; and what NVML's answers are made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from dist_core.link.environment import emulated_profile
from trials.launch import LocalLauncher
from trials.launch.emulated import emulated_slots, emulation
from trials.launch.gpus import Gpu, Nvml
from trials.launch.slots import by_node, divide, numa_nodes


def gpu(number: int, model: str = "H100", near: tuple[int, ...] = ()) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", model=model, near_cores=near)


def test_without_gpus_each_core_is_a_slot_that_binds_nobody() -> None:
    slots = divide("here", [], range(4))
    assert [slot.cores for slot in slots] == [()] * 4
    assert slots[0].environ(None) == {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ELASTUNE_GPU_SHARE": "1.0",
    }
    assert len(divide("here", [], range(4), slots=7)) == 7


def test_slots_of_cores_spread_over_numa_nodes_neighbours_together() -> None:
    slots = divide("here", [], range(1, 8), [range(4), range(4, 8)], slots=4)
    assert [slot.cores for slot in slots] == [(1, 2, 3), (1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]
    assert slots[0].environ(None)["ELASTUNE_CORES"] == "1,2,3"


def test_gpus_are_slots_bound_to_the_cores_near_them() -> None:
    near, far = tuple(range(8)), tuple(range(8, 16))
    slots = divide("here", [gpu(0, near=near), gpu(1, near=far)], range(16))
    assert [(slot.gpus, slot.cores, slot.threads) for slot in slots] == [(("GPU-0",), near, 8), (("GPU-1",), far, 8)]
    assert slots[1].environ(None)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert slots[1].environ("3")["OMP_NUM_THREADS"] == "3"
    assert divide("here", [gpu(0, near=near)], range(8))[0].cores == ()


def test_parts_of_gpus_are_a_kind_of_their_own() -> None:
    slots = divide("here", [gpu(0), gpu(1)], range(16), per_gpu=4)
    assert [slot.gpus for slot in slots] == [("GPU-0",)] * 4 + [("GPU-1",)] * 4
    assert {(slot.kind, slot.gpu_share, slot.threads) for slot in slots} == {("H100/4", 0.25, 2)}
    assert len(divide("here", [gpu(0), gpu(1)], range(16), slots=1)) == 1


def test_a_machine_with_different_gpus_looks_like_several() -> None:
    slots = divide("here", [gpu(0), gpu(1, "A100"), gpu(2)], range(4))
    assert {node: [slot.gpus[0] for slot in its] for node, its in by_node(slots).items()} == {
        "here": ["GPU-0", "GPU-2"],
        "here-2": ["GPU-1"],
    }


def test_a_slot_may_have_several_gpus_of_one_model() -> None:
    near, far = tuple(range(4)), tuple(range(4, 8))
    gpus = [gpu(0, near=near), gpu(1, "A100", near), gpu(2, near=near), gpu(3, near=far), gpu(4, near=far), gpu(5)]
    slots = divide("here", gpus, range(8), gpus_each=2)
    assert [slot.gpus for slot in slots] == [("GPU-0", "GPU-2"), ("GPU-3", "GPU-4")]
    assert [slot.cores for slot in slots] == [near, far]
    assert {(slot.kind, slot.gpu_share, slot.threads) for slot in slots} == {("H100 x2", 1.0, 2)}
    assert slots[0].environ(None)["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-2"
    assert divide("here", [gpu(0)], range(2), gpus_each=2) == ()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the second one divided into two instances; a process works on the first."""
    for name, answer in {
        "Init": lambda: None,
        "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": lambda index: f"h{index}",
        "DeviceGetUUID": lambda handle: {"h0": "GPU-aaaa", "h1": "GPU-bbbb"}.get(handle, f"MIG-{handle}"),
        "DeviceGetMigMode": lambda handle: (int(handle == "h1"), 0),
        "DeviceGetMaxMigDeviceCount": lambda handle: 7,
        "DeviceGetMigDeviceHandleByIndex": _instance,
        "DeviceGetCpuAffinity": lambda handle, words: [0b1100] + [0] * (words - 1),
        "DeviceGetName": lambda handle: "H100" if handle == "h0" else "H100 MIG 3g",
        "DeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7)] if handle == "h0" else [],
    }.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


def _instance(handle: str, number: int) -> str:
    if number >= 2:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return f"{handle}i{number}"


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (None, ["GPU-aaaa", "MIG-h1i0", "MIG-h1i1"]),
        ("0", ["GPU-aaaa"]),
        ("GPU-aa", ["GPU-aaaa"]),
        ("1:1,MIG-h1i0", ["MIG-h1i0", "MIG-h1i1"]),
        ("1", ["MIG-h1i0", "MIG-h1i1"]),
        ("GPU-bbbb", ["MIG-h1i0", "MIG-h1i1"]),
        ("", []),
        ("3", []),
    ],
)
def test_the_driver_tells_the_gpus_that_may_be_used(limit: str | None, found: list[str]) -> None:
    source = Nvml({} if limit is None else {"CUDA_VISIBLE_DEVICES": limit})
    assert [each.uuid for each in source.gpus()] == found
    assert all(each.near_cores == (2, 3) for each in source.gpus())
    assert {name for name, pids in source.users().items() if pids} <= {"GPU-aaaa"}


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert Nvml({}).gpus() == []


# ---------------------------------------------------------------------- what this machine has that slots are made of


def test_numa_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    for number, cores in ((0, "0-2,6"), (10, "8"), (2, "3-5")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert numa_nodes(tmp_path) == ((0, 1, 2, 6), (3, 4, 5), (8,))


# ---------------------------------------------------------------------- slots that stand for other devices


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
