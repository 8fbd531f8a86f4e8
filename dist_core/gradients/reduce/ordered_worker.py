"""A thread that carries out reductions of several collectives each, in the order they were asked for.

Collectives on one group must be issued in the same order by all replicas. Futures complete in any order, so a second
collective that follows from a first one cannot be issued from its callback; here it is issued from one thread, bucket
after bucket, while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dist_core.device import Device, Mark, Stream, device_of
from dist_core.gradients.reduce.contract import ReducedBucket
from dist_core.gradients.reduce.job_line import JobLine


class OrderedWorker:
    def __init__(self, name: str) -> None:
        self._line = JobLine(name)
        self._streams: dict[int, Stream] = {}
        """Of each device: what jobs wait for there, the backward pass does not."""

    def submit(self, job: Callable[[], torch.Tensor], *, on: torch.device) -> ReducedBucket:
        """The job's tensor on that device, later; its exception becomes the future's."""
        device = device_of(on)
        result, asked = device.future(), device.mark()
        self._line.put(lambda: self._do(job, device, asked, result))
        return result

    def close(self) -> None:
        self._line.close()

    def _do(self, job: Callable[[], torch.Tensor], device: Device, asked: Mark, result: ReducedBucket) -> None:
        """``asked``: the bucket is written by then."""
        if id(device) not in self._streams:
            self._streams[id(device)] = device.stream()
        with self._streams[id(device)].behind(asked):
            try:
                result.set_result(job())
            except Exception as error:
                result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch
