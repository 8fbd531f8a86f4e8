"""A thread that carries out reductions of several collectives each, in the order they were asked for.

Collectives on one group must be issued in the same order by all replicas. Futures complete in any order, so a second
collective that follows from a first one cannot be issued from its callback; here it is issued from one thread, bucket
after bucket, while the backward pass goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from dist_core.device import Device, Mark, Stream, device_of
from dist_core.gradients.reduce.contract import ReducedBucket


class OrderedWorker:
    def __init__(self, name: str) -> None:
        self._line = JobLine(name)
        self._streams: dict[int, Stream] = {}
        """Streams by device, on which jobs wait so that the backward pass does not."""

    def submit(self, job: Callable[[], torch.Tensor], *, on: torch.device) -> ReducedBucket:
        """Return the job's tensor on that device, later; its exception becomes the future's."""
        device = device_of(on)
        result, asked = device.future(), device.mark()
        self._line.put(lambda: self._do(job, device, asked, result))
        return result

    def close(self) -> None:
        self._line.close()

    def _do(self, job: Callable[[], torch.Tensor], device: Device, asked: Mark, result: ReducedBucket) -> None:
        """Run one job of the queue; at the mark ``asked`` its bucket is written."""
        if id(device) not in self._streams:
            self._streams[id(device)] = device.stream()
        with self._streams[id(device)].behind(asked):
            try:
                result.set_result(job())
            except Exception as error:
                result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch


class JobLine:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job; the first one starts the thread. A job tells of its errors itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"elastune-{self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was asked for, and take no more."""
        self._jobs.put(None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            job()
            # Nothing of a job outlives it here: the next one may be long in coming.
            del job
