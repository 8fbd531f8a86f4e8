"""The device that computes: what it has done of what it was given, and memory it copies into by itself.

A call that gives work to a GPU returns before the work is done. Code that times it by the host's clock, reads a number
that is still to be computed, or changes what is still to be copied is right on a CPU and wrong there. So whatever
depends on when work is done goes through here: ``Device`` is a CPU, whose work is done when the call returns, and
``Gpu`` a CUDA device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist


@dataclass(slots=True, eq=False)
class Mark:
    """A place in a stream, behind what it had been given when the mark was made; a CPU's is a time of its clock."""

    at: float

    @property
    def reached(self) -> bool:
        """Tell whether the device has come to this mark."""
        return True

    def wait(self) -> None:
        """Hold this thread until the device comes here."""

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time between two marks of its own, both reached."""
        return self.at - earlier.at


class Stream:
    """Work that the device does beside that of other streams."""

    def behind(self, mark: Mark) -> AbstractContextManager[None]:
        """Queue this thread's work within the block on this stream, to begin when the mark is reached."""
        return contextlib.nullcontext()


class Device:
    """A CPU; other devices inherit from it."""

    is_host = True
    """The device's memory is the host's, so that Gloo sends tensors from where they lie."""
    has_nccl = False
    """NCCL connects this device with others of its kind."""
    chunk = 131072
    """Elements to process at once, if the result needs memory of its own: what stays in a core's cache is read once."""

    def mark(self) -> Mark:
        """Behind what this thread's stream was given so far."""
        return Mark(time.perf_counter())

    def follow(self, mark: Mark) -> None:
        """Make this thread's stream wait for the mark from now on, without blocking the thread."""

    def stream(self) -> Stream:
        """Return a new stream."""
        return Stream()

    def host_memory(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device reads and writes by itself."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in this thread's stream.

        One tensor may be in ``host_memory``, and a mark made next says when it is done.
        """
        target.copy_(source)

    def read_here(self, tensors: list[torch.Tensor]) -> None:
        """Keep the memory of another stream's tensors until this thread's stream has read them."""

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future whose callbacks find the device's work done that came before its result."""
        return torch.futures.Future()


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The time between two marks of one device."""

    begin: Mark
    end: Mark

    @property
    def is_known(self) -> bool:
        return self.begin.reached and self.end.reached

    @property
    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)


def device_of(where: torch.Tensor | torch.device) -> Device:
    """Return the device that holds a tensor. Raises ValueError for a kind that nobody has described here."""
    place = where.device if isinstance(where, torch.Tensor) else where
    device = _devices.get(place)
    if device is None:
        if place.type != "cuda":
            raise ValueError(f"tensors are on {place}; elastune trains on cpu and cuda devices")
        device = _devices[place] = Gpu(place)
    return device


def known_seconds(seconds: float) -> Elapsed:
    """Return a time that was measured already."""
    return Elapsed(Mark(0.0), Mark(seconds))


# --------------------------------------------------------------------------------------------------------------- CUDA


class GpuMark(Mark):
    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # not annotated in torch

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        return float(cast("GpuMark", earlier)._event.elapsed_time(self._event)) / 1000.0


class GpuStream(Stream):
    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream: Any = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]  # not annotated in torch

    @contextmanager
    def behind(self, mark: Mark) -> Iterator[None]:
        self._stream.wait_event(cast("GpuMark", mark)._event)
        # The device first: to go back to another one would make a context there.
        with torch.cuda.device(self._place), torch.cuda.stream(self._stream):
            yield


class Gpu(Device):
    """A call returns when its work is in a stream."""

    is_host = False
    chunk = 1 << 24
    """64 MiB of float32: long enough for full speed, and no copy of an embedding of gigabytes."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self.has_nccl = dist.is_nccl_available()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # not annotated in torch
        event.record(self._present)
        return GpuMark(event)

    def follow(self, mark: Mark) -> None:
        self._present.wait_event(cast("GpuMark", mark)._event)

    def stream(self) -> Stream:
        return GpuStream(self._place)

    @property
    def _present(self) -> Any:
        return torch.cuda.current_stream(self._place)

    def host_memory(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self.read_here([each for each in (target, source) if each.device == self._place])

    def read_here(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(self._present)

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future(devices=[self._place])


HOST = Device()
_devices: dict[torch.device, Device] = {torch.device("cpu"): HOST}


def limit_memory(where: torch.device, share: float) -> None:
    """Limit this process to its share of a GPU that several replicas use."""
    if where.type == "cuda" and share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share, where)


def release_cached_memory() -> None:
    """Return memory of tensors that are gone to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
