"""The machine's NVIDIA GPUs: what there is, which cores are near, who uses them.

Asked of NVML, the driver's own library, which touches no GPU and needs no CUDA. A machine without a driver has none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    uuid: str
    """What CUDA_VISIBLE_DEVICES takes; also that of an instance of a GPU that is divided (MIG)."""
    model: str
    memory_bytes: int
    near_cores: tuple[int, ...] = ()
    """Cores of its NUMA node; empty when that is not known."""


class GpuSource(Protocol):
    def gpus(self) -> Sequence[Gpu]: ...

    def users(self) -> Mapping[str, frozenset[int]]:
        """By GPU: the pids of the processes that hold memory on it."""
        ...


class NoGpus:
    """A machine without any, and for tests a machine with made-up ones."""

    def __init__(self, gpus: Sequence[Gpu] = ()) -> None:
        self._gpus = tuple(gpus)
        self.in_use: dict[str, frozenset[int]] = {}

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def users(self) -> Mapping[str, frozenset[int]]:
        return self.in_use


class Nvml:
    """GPUs that the driver knows, limited to CUDA_VISIBLE_DEVICES where that is set."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        limit = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        self._wanted = None if limit is None else [part.strip() for part in limit.split(",") if part.strip()]
        self._handles: dict[str, Any] = {}
        self._gpus: list[Gpu] = []
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for index, name, handle in _devices():
                if self._wanted is None or {str(index), name} & set(self._wanted) or _begins(name, self._wanted):
                    self._handles[name] = handle
                    self._gpus.append(_describe(name, handle))

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def users(self) -> Mapping[str, frozenset[int]]:
        found: dict[str, frozenset[int]] = {}
        for name, handle in self._handles.items():
            with contextlib.suppress(pynvml.NVMLError):
                found[name] = frozenset(row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return found


def _devices() -> Iterator[tuple[str, str, Any]]:
    """(index, UUID, handle) of each GPU, or of each instance of one that is divided."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        parts = {f"{index}:{number}": part for number, part in enumerate(_instances(handle))}
        for name, part in (parts or {str(index): handle}).items():
            yield name, pynvml.nvmlDeviceGetUUID(part), part


def _instances(handle: Any) -> Iterator[Any]:
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return
    for number in range(most):
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def _begins(name: str, wanted: Sequence[str]) -> bool:
    """CUDA takes the beginning of a UUID for the whole of it."""
    return any(len(part) > len("GPU-") and name.startswith(part) for part in wanted)


def _describe(name: str, handle: Any) -> Gpu:
    cores: tuple[int, ...] = ()
    words = (os.cpu_count() or 1) // 64 + 1
    with contextlib.suppress(pynvml.NVMLError):
        near = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
        cores = tuple(64 * word + bit for word in range(words) for bit in range(64) if near[word] >> bit & 1)
    return Gpu(
        uuid=name,
        model=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        near_cores=cores,
    )
