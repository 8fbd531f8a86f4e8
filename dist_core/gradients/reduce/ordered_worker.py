"""A thread that carries out reductions of several collectives each, in the order they were asked for.

Collectives on one group must be issued in the same order by all replicas. Futures complete in any order, so a second
collective that follows from a first one cannot be issued from its callback; here it is issued from one thread, bucket
after bucket, while the backward pass goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dist_core.device import Device, Mark, Stream, device_of
from dist_core.gradients.reduce.contract import ReducedBucket


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], torch.Tensor]
    device: Device
    asked: Mark
    """The bucket is written by then."""
    result: ReducedBucket


class OrderedWorker:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[int, Stream] = {}
        """Of each device: what jobs wait for there, the backward pass does not."""

    def submit(self, job: Callable[[], torch.Tensor], *, on: torch.device) -> ReducedBucket:
        """The job's tensor on that device, later; its exception becomes the future's."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"elastune-{self._name}", daemon=True)
            self._thread.start()
        device = device_of(on)
        future = device.future()
        self._jobs.put(_Job(job, device, device.mark(), future))
        return future

    def close(self) -> None:
        """What was asked for is done; nothing is asked for any more."""
        self._jobs.put(None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            if id(job.device) not in self._streams:
                self._streams[id(job.device)] = job.device.stream()
            with self._streams[id(job.device)].behind(job.asked):
                try:
                    job.result.set_result(job.run())
                except Exception as error:
                    job.result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch
