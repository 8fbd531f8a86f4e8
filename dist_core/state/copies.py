"""Copies of a state in the host's memory, made beside training.

On a CPU another thread copies; a GPU copies by itself, in a stream beside the one that trains.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from dist_core.device import Device, Mark, Stream, device_of

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source); the target is in the ``host_memory`` of the source's device."""


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    return device_of(tensor).host_memory(tensor.shape, tensor.dtype)


def in_host_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor as it is now, contiguous and ready to be read: itself where it already lies in host memory."""
    copies, marks = [], []
    for tensor in tensors:
        device = device_of(tensor)
        if device.is_host:
            copies.append(tensor.contiguous())
        else:
            copies.append(host_memory_for(tensor))
            device.copy(copies[-1], tensor)
            marks.append(device.mark())
    for mark in marks:
        mark.wait()
    return copies


class Copying:
    """One state's copies, under way."""

    def __init__(self, of_host: list[Pair], made: list[tuple[Device, Mark]]) -> None:
        self._of_host = of_host
        self._made = made
        """Marks at which each device will have made its copies."""
        self._copied = threading.Event()
        if not of_host:
            self._copied.set()

    def finish(self) -> None:
        """Wait until all targets can be read; called by the thread that reads them."""
        try:
            for target, source in self._of_host:
                target.copy_(source)
        finally:
            self.give_up()
        for _, mark in self._made:
            mark.wait()

    def give_up(self) -> None:
        """Give up the copies: nobody will read the targets, or all have been copied."""
        self._copied.set()

    def settle(self) -> None:
        """Let what this thread does next change all sources: on a GPU that waits, and the thread does not."""
        self._copied.wait()
        for device, mark in self._made:
            device.follow(mark)


class Copies:
    """One state after another, begun by the thread that trains."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        """Streams by device."""

    def begin(self, now: Iterable[Pair], later: Iterable[Pair]) -> Copying:
        """Begin to copy: sources in ``now`` may change from here on, those in ``later`` after ``settle``."""
        of_host, made = [], []
        for target, source in now:
            device = device_of(source)
            # In the stream that trains: what changes the source comes behind it there.
            device.copy(target, source)
            made.append((device, device.mark()))
        for target, source in later:
            device = device_of(source)
            if device.is_host:
                of_host.append((target, source))
                continue
            with self._stream(device).behind(device.mark()):
                device.copy(target, source)
                made.append((device, device.mark()))
        return Copying(of_host, made)

    def _stream(self, device: Device) -> Stream:
        if id(device) not in self._streams:
            self._streams[id(device)] = device.stream()
        return self._streams[id(device)]
