"""Buckets of a device that Gloo cannot send from: reduced in the host's memory, whatever the strategy.

A bucket is copied beside the backward pass into memory that the device writes by itself; once it is there a thread
hands it to the strategy, and the sum is copied back. So a GPU that several replicas share, which NCCL refuses, reduces
like a CPU does, at the price of two copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dist_core.device import Device, Mark, Stream
from dist_core.generations.fuse import Fuse
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy
from dist_core.gradients.reduce.job_line import JobLine


@dataclass(frozen=True, slots=True)
class _Job:
    strategy: ReductionStrategy
    bucket: Bucket
    host: torch.Tensor
    arrived: Mark
    result: ReducedBucket


class Staging:
    """Of one group of replicas; its thread issues their reductions, in the order of the buckets."""

    def __init__(self, device: Device, fuse: Fuse) -> None:
        self._device = device
        self._fuse = fuse
        self._down: Stream = device.stream()
        self._up: Stream = device.stream()
        self._host: dict[tuple[int, int], torch.Tensor] = {}
        """By where a bucket lies, of any model, and kept from step to step: such memory takes longer to get than to
        fill."""
        self._line = JobLine("staging")

    def reduce(self, strategy: ReductionStrategy, bucket: Bucket) -> ReducedBucket:
        """The sum over the replicas, in the bucket's own memory."""
        device, buffer = self._device, bucket.buffer
        key = buffer.data_ptr(), buffer.numel()
        host = self._host.get(key)
        if host is None or host.dtype != buffer.dtype:
            host = self._host[key] = device.host_memory(buffer.shape, buffer.dtype)
        with self._down.behind(device.mark()):
            device.copy(host, buffer)
            arrived = device.mark()
        job = _Job(strategy, bucket, host, arrived, device.future())
        self._line.put(lambda: self._reduce_there(job))
        return job.result

    def close(self) -> None:
        self._line.close()

    def _reduce_there(self, job: _Job) -> None:
        try:
            job.arrived.wait()
            reduced = job.strategy.reduce(Bucket(job.bucket.index, job.host, job.bucket.layout))
            self._fuse.settled(reduced).add_done_callback(lambda _: self._copy_back(reduced, job))
        except Exception as error:
            job.result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch

    def _copy_back(self, reduced: ReducedBucket, job: _Job) -> None:
        try:
            if not reduced.done():
                raise RuntimeError("the replicas' connections were broken off")
            with self._up.behind(job.arrived):
                self._device.copy(job.bucket.buffer, reduced.value())
                job.result.set_result(job.bucket.buffer)
        except Exception as error:
            job.result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch
