"""The machine's NVIDIA GPUs: what there is, which cores are near, who uses them.

Asked of NVML, the driver's own library, which touches no GPU and needs no CUDA. A machine without a driver has none.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    uuid: str
    """Name that CUDA_VISIBLE_DEVICES takes, also of an instance of a GPU that is divided (MIG)."""
    model: str
    near_cores: tuple[int, ...] = ()
    """Cores of its NUMA node; empty when that is not known."""


class GpuSource(Protocol):
    def gpus(self) -> Sequence[Gpu]: ...

    def users(self) -> Mapping[str, frozenset[int]]:
        """Return the pids of the processes that hold memory on each GPU."""
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
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError:
            return
        for index in range(count):
            try:
                self._add(index)
            except pynvml.NVMLError as error:
                logger.warning("gpu cannot be used index=%d error=%s", index, error)

    def _add(self, index: int) -> None:
        """Add the GPU of this number, or the instances of one that is divided."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        whole = {str(index), pynvml.nvmlDeviceGetUUID(handle)}
        parts = list(_instances(handle))
        for number, part in enumerate(parts or [handle]):
            name = pynvml.nvmlDeviceGetUUID(part)
            if self._wanted is None or any(_names(each, {*whole, f"{index}:{number}", name}) for each in self._wanted):
                self._gpus.append(_describe(name, part))
                self._handles[name] = part

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def users(self) -> Mapping[str, frozenset[int]]:
        pids_by_gpu: dict[str, frozenset[int]] = {}
        for name, handle in self._handles.items():
            with contextlib.suppress(pynvml.NVMLError):
                pids_by_gpu[name] = frozenset(row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return pids_by_gpu


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


def _names(wanted: str, names: set[str]) -> bool:
    """Tell whether ``wanted`` is one of a GPU's names, or the beginning of its UUID, which CUDA accepts too."""
    return wanted in names or (len(wanted) > len("GPU-") and any(name.startswith(wanted) for name in names))


def _describe(name: str, handle: Any) -> Gpu:
    cores: tuple[int, ...] = ()
    words = (os.cpu_count() or 1) // 64 + 1
    with contextlib.suppress(pynvml.NVMLError):
        near = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
        cores = tuple(64 * word + bit for word in range(words) for bit in range(64) if near[word] >> bit & 1)
    return Gpu(
        uuid=name,
        model=str(pynvml.nvmlDeviceGetName(handle)),
        near_cores=cores,
    )
