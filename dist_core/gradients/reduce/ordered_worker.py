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

from dist_core.gradients.reduce.contract import ReducedBucket


class OrderedWorker:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], torch.Tensor], ReducedBucket]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], torch.Tensor], *, device: torch.device) -> ReducedBucket:
        """The job's tensor, later; its exception becomes the future's."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"elastune-{self._name}", daemon=True)
            self._thread.start()
        devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        future: ReducedBucket = torch.futures.Future(devices=devices)
        self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            job, future = self._jobs.get()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch
