"""A device that runs late, over tensors that lie in the host's memory.

What a test gives it takes time by a clock of its own, and the call returns at once. A copy holds nothing that can be
used until the device has come to it; one in a stream of its own takes what its source holds *then*, because what the
training stream does in between runs beside it. So code that takes launch times for step times, reads a number before
it is there, or changes what is still being copied is wrong here on any machine, as it would be on a GPU.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from dist_core import device
from dist_core.device import Device, Mark, Stream

GARBAGE = 1e9


class Clock:
    """Seconds that pass only while somebody waits for the device; and the host's, where ``real``."""

    def __init__(self, *, real: bool = False) -> None:
        self._real = real
        self._began = time.perf_counter()
        self._skipped = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._skipped + (time.perf_counter() - self._began if self._real else 0.0)

    def advance_to(self, at: float) -> None:
        with self._lock:
            self._skipped += max(0.0, at - self.now())


@dataclass(eq=False)
class _Queue:
    """A stream: when it has done what it was given."""

    free_at: float = 0.0


@dataclass(eq=False)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor
    at: float
    value: torch.Tensor | None
    """What it holds, once that can change no more."""

    def take(self) -> None:
        if self.value is None:
            self.value = self.source.detach().clone()


@dataclass(eq=False)
class LateMark(Mark):
    owner: LateDevice

    @property
    def reached(self) -> bool:
        return self.owner.clock.now() >= self.at

    def wait(self) -> None:
        self.owner.clock.advance_to(self.at)
        self.owner.show_what_is_done()

    def seconds_since(self, earlier: Mark) -> float:
        if not (self.reached and earlier.reached):
            raise AssertionError("a time was read before the device came there")
        return self.at - earlier.at


@dataclass(frozen=True, eq=False)
class LateStream(Stream):
    owner: LateDevice
    queue: _Queue

    @contextmanager
    def behind(self, mark: Mark) -> Iterator[None]:
        self.queue.free_at = max(self.queue.free_at, mark.at)
        before = self.owner.present
        self.owner.present = self.queue
        try:
            yield
        finally:
            self.owner.present = before


@dataclass(eq=False)
class LateDevice(Device):
    """``copy_seconds``: of each copy between the device and the host's memory."""

    clock: Clock = field(default_factory=Clock)
    copy_seconds: float = 0.01
    is_host: bool = False
    has_nccl: bool = False
    chunk: int = 64

    def __post_init__(self) -> None:
        self._local = threading.local()
        self._training = _Queue()
        self._copies: list[_Copy] = []
        self._of_host: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ what a test gives it

    def launch(self, seconds: float) -> None:
        """Work of this length, in this thread's stream."""
        self._begin_at(self.clock.now())
        self.present.free_at += seconds

    def _begin_at(self, now: float) -> None:
        self.present.free_at = max(self.present.free_at, now)

    # ------------------------------------------------------------------ what the core asks of it

    @property
    def present(self) -> _Queue:
        found: _Queue = getattr(self._local, "queue", self._training)
        return found

    @present.setter
    def present(self, queue: _Queue) -> None:
        self._local.queue = queue

    def mark(self) -> LateMark:
        self._begin_at(self.clock.now())
        return LateMark(self.present.free_at, self)

    def follow(self, mark: Mark) -> None:
        at = mark.at
        self.present.free_at = max(self.present.free_at, at)
        # What this thread does next comes behind those copies: they hold what is there now.
        with self._lock:
            for copy in self._copies:
                if copy.at <= at:
                    copy.take()

    def stream(self) -> LateStream:
        return LateStream(self, _Queue())

    def host_memory(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self._of_host[id(memory)] = weakref.ref(memory)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(self.copy_seconds)
        with self._lock, torch.no_grad():
            # One that is under way is read by nobody but this one.
            pending = [copy for copy in self._copies if copy.target is source]
            if pending:
                raise AssertionError("what is still being copied was read")
            begun = _Copy(target, source, self.present.free_at, None)
            if self.present is self._training:
                begun.take()
                known = self._of_host.get(id(target))
                if known is None or known() is not target:
                    # What comes next in the same stream finds it there.
                    target.copy_(cast("torch.Tensor", begun.value))
                    return
            target.copy_(torch.full_like(target, GARBAGE if target.is_floating_point() else 0))
            self._copies.append(begun)

    def show_what_is_done(self) -> None:
        """Copies that the device has come to are there."""
        with self._lock, torch.no_grad():
            now = self.clock.now()
            for copy in [each for each in self._copies if each.at <= now]:
                copy.take()
                copy.target.copy_(cast("torch.Tensor", copy.value))
                self._copies.remove(copy)

    def read_here(self, tensors: list[torch.Tensor]) -> None:
        pass

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return _LateFuture(self)


class _LateFuture(torch.futures.Future):  # type: ignore[type-arg]  # generic for type checkers only
    """Its callbacks find done what the device was given before the result."""

    def __init__(self, owner: LateDevice) -> None:
        super().__init__()
        self._owner = owner

    def set_result(self, result: Any) -> None:
        self._owner.mark().wait()
        super().set_result(result)


@contextmanager
def in_place_of_the_cpu(late: LateDevice) -> Iterator[LateDevice]:
    """Within, tensors of the host's are this device's."""
    place = torch.device("cpu")
    before = device._devices[place]
    device._devices[place] = late
    try:
        yield late
    finally:
        device._devices[place] = before


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[float], None], seconds: float) -> torch.Tensor:
        ctx.work, ctx.seconds = work, seconds
        work(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.work(2 * ctx.seconds)
        return gradient, None, None


class TakesTime(nn.Module):
    """Each example takes the device this long forwards, and twice as long backwards."""

    def __init__(self, late: LateDevice, seconds: float) -> None:
        super().__init__()
        self._late, self._seconds = late, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", _Takes.apply(x, self._late.launch, self._seconds * len(x)))
