"""The process group that DDP reduces gradients over: weighs, measures and reduces each bucket as it becomes ready.

DDP divides gradients by the group's size while it copies them into a bucket, at no cost of its own, and then asks the
group for an all-reduce. A communication hook would have to do that division in another pass over all gradients; so
this is a group, not a hook. Where replicas' shares of a batch differ, the bucket is corrected before it travels, and
the sum is the exact mean over all examples however they are split.

On measured steps the squared norms for the noise scale are read here: the local gradient's before the reduction, and
of the reduced one each replica reads its own slice (every replica has the same sum, and the control reduction adds the
slices up). A collective that fails does not raise inside the user's backward pass: it is reported, and the step is
not applied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from dist_core.device import Device, Mark, Stream
from dist_core.generations.fuse import CONNECTIONS_ABORTED, Fuse
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.bucket_views import GradientViews
from dist_core.gradients.noise.norms import Segment, squared_norm
from dist_core.gradients.reduce import Bucket, ReducedBucket, ReductionStrategy, completed, reduction_strategy
from dist_core.gradients.reduce.ordered_worker import JobLine
from dist_core.torch_private import GradBucket, work_of

logger = logging.getLogger(__name__)

LONG_SECONDS = 60.0
"""A replica that waits so long for the others in a forward pass says so."""
NormOf = Callable[[torch.Tensor, Sequence[Segment], int, int], torch.Tensor]
"""Squared norm of a part of a flat buffer, preconditioned or not; see ``noise.norms``."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    description: GradBucket | None
    """Only for strategies that read it: it holds as much memory as the bucket."""
    segments: tuple[Segment, ...]


@dataclass(slots=True)
class StepNorms:
    """Norms that this replica contributes to one step's measurement; sums over the replicas give the two statistics.

    ``difference`` sums to L - T (weighted mean of the squared local norms less the squared norm of the mean) over all
    backward passes of the step, ``total`` to T after the last one.
    """

    difference: list[torch.Tensor]
    total: list[torch.Tensor]


class BucketReducer(dist.ProcessGroup):
    def __init__(
        self,
        group: ReplicaGroup,
        strategy: ReductionStrategy,
        device: Device,
        *,
        on_first_bucket: Callable[[], None],
        on_error: Callable[[str], None],
    ) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]  # an overload the stubs leave out
        self._group = group
        self._device = device
        apart = group.world_size > 1 and not device.is_host and not group.has_nccl
        self._staging: Staging | None = None
        if apart:
            self._staging = group.once("staging", lambda: Staging(device, group.fuse))
        self.strategy = strategy
        self._exact = reduction_strategy("all_reduce")
        self._exact.enter(group)
        self._on_first_bucket = on_first_bucket
        self._on_error = on_error
        self._next_bucket = 0
        self.layouts: list[BucketLayout] = []
        """As DDP lays the buckets out now; only looked at by strategies and norms that need it."""
        self.passive = False
        """Answer with the buffers as they are: a pass that other replicas take no part in."""
        self.weight = 1.0 / group.world_size
        """This replica's share of the step's examples."""
        self.correction = 1.0
        """Factor by which DDP's division by the world size becomes a multiplication by ``weight``."""
        self.norms: StepNorms | None = None
        """Norms to fill in for this step; None on steps that do not measure."""
        self.exactly = False
        """Reduce this step without compression, whatever the strategy: its norms have to be those of the sum."""
        self.measuring = False
        """Off once the optimizer has stepped: what reaches the model later in a step is not that step's gradient."""
        self.norm_of: NormOf | None = None
        self.last_bucket: Mark | None = None
        """Mark of the device when it had written the latest bucket."""
        self.reductions = 0
        """Reductions of all gradients in the present step: one for each backward pass that sums them."""
        self.views: GradientViews | None = None
        """Places of the gradients in the buckets."""
        self.reduced = False
        """True once gradients have reached the buckets in the present step."""

    def close(self) -> None:
        """Let go of the connections, even if a reduction that never ends holds on to this object."""
        self.passive = True
        self._group = cast("ReplicaGroup", None)
        self.strategy = self._exact = cast("ReductionStrategy", None)

    def begin_backward(self) -> None:
        self._next_bucket = 0
        if self.norms is not None and self.measuring:
            self.norms.total.clear()

    # ------------------------------------------------------------------ what DDP calls

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "elastune"

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]  # as DDP calls it
        [buffer] = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        if not buffer.is_floating_point():
            # DDP's own bookkeeping: which parameters were used anywhere.
            return self._among_all(buffer, lambda group, tensor: group.allreduce([tensor]))
        if self.views is not None:
            self.views.note(buffer)
        index, self._next_bucket = self._next_bucket, self._next_bucket + 1
        future = self._reduce(index, buffer)
        return work_of(future.then(lambda done: [done.value()]))

    def broadcast(self, tensors: Any, options: Any) -> dist.Work:  # type: ignore[override]  # as DDP calls it
        """Take over rank 0's bookkeeping, or buffers, in the forward pass: all replicas have to come to it."""
        waits = threading.Timer(LONG_SECONDS, _say_that_it_waits)
        waits.daemon = True
        waits.start()
        try:
            return self._among_all(tensors[0], lambda group, tensor: group.broadcast([tensor], options))
        finally:
            waits.cancel()

    def _among_all(
        self, tensor: torch.Tensor, collective: Callable[[dist.ProcessGroup, torch.Tensor], dist.Work]
    ) -> dist.Work:
        """Sum one of DDP's buckets over all replicas.

        A loss is reported, not raised into the user's forward or backward pass.
        """
        if not self.passive:
            # Buckets that are staged leave from another thread: over their group the order would not be everybody's.
            group = self._group.data if self._staging is None else self._group.control
            sent = tensor if self._staging is None else tensor.cpu()
            try:
                self._group.wait(collective(group, sent), group)
            except RuntimeError as error:
                self._on_error(str(error))
            if sent is not tensor:
                tensor.copy_(sent)
        return work_of(completed(tensor).then(lambda done: [done.value()]))

    # ------------------------------------------------------------------ one bucket

    def _reduce(self, index: int, buffer: torch.Tensor) -> ReducedBucket:
        self.reduced = True
        if self.passive:
            return completed(buffer)
        if self.correction != 1.0:
            buffer.mul_(self.correction)
        norms = self.norms if self.measuring and not buffer.is_sparse else None
        if norms is not None and self.weight > 0.0:
            # The buffer holds w_i g_i, and w_i |g_i|^2 is wanted.
            norms.difference.append(self._norm(index, buffer, 0, buffer.numel()) / self.weight)
        self.last_bucket = self._device.mark()
        if index == 0:
            self.reductions += 1
            self._on_first_bucket()
        try:
            strategy = self._exact if self.exactly and not self.strategy.exact else self.strategy
            bucket = Bucket(index, buffer, lambda: self._description(index))
            future = strategy.reduce(bucket) if self._staging is None else self._staging.reduce(strategy, bucket)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._on_error(str(error))
            return completed(buffer)
        if self._device.is_host and self._group.world_size > 1:
            return self._group.fuse.settled(future).then(lambda _: self._reduced(future, index, buffer, norms))
        return future.then(lambda done: self._reduced(done, index, buffer, norms))

    def _reduced(self, done: ReducedBucket, index: int, buffer: torch.Tensor, norms: StepNorms | None) -> torch.Tensor:
        if not done.done():
            self._on_error(CONNECTIONS_ABORTED)
            return buffer
        try:
            reduced = done.value()
        except RuntimeError as error:
            self._on_error(str(error))
            return buffer
        if norms is not None and not self.passive:
            size, rank = self._group.world_size, self._group.rank
            start, stop = reduced.numel() * rank // size, reduced.numel() * (rank + 1) // size
            slice_norm = self._norm(index, reduced, start, stop)
            norms.total.append(slice_norm)
            norms.difference.append(-slice_norm)
        return reduced

    def _description(self, index: int) -> GradBucket:
        description = self.layouts[index].description
        assert description is not None, "the strategy reads layouts, which are kept for those that do"
        return description

    def _norm(self, index: int, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if self.norm_of is None:
            return squared_norm(buffer[start:stop])
        return self.norm_of(buffer, self.layouts[index].segments, start, stop)


@dataclass(frozen=True, slots=True)
class _Job:
    strategy: ReductionStrategy
    bucket: Bucket
    host: torch.Tensor
    arrived: Mark
    result: ReducedBucket


class Staging:
    """Reductions of one group of replicas in the host's memory, issued by a thread in the order of the buckets."""

    def __init__(self, device: Device, fuse: Fuse) -> None:
        self._device = device
        self._fuse = fuse
        self._down: Stream = device.stream()
        self._up: Stream = device.stream()
        self._host: dict[tuple[int, int], torch.Tensor] = {}
        """Host memory by where a bucket of any model lies; kept from step to step, because it takes longer to get than
        to fill."""
        self._line = JobLine("staging")

    def reduce(self, strategy: ReductionStrategy, bucket: Bucket) -> ReducedBucket:
        """Return the sum over the replicas, in the bucket's own memory."""
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
                raise RuntimeError(CONNECTIONS_ABORTED)
            with self._up.behind(job.arrived):
                self._device.copy(job.bucket.buffer, reduced.value())
                job.result.set_result(job.bucket.buffer)
        except Exception as error:
            job.result.set_exception(error)  # type: ignore[arg-type]  # annotated as a result in torch


def _say_that_it_waits() -> None:
    logger.warning(
        "this replica has waited %.0f s in a model's forward pass for the others to come there too. If they leave this "
        "model out of the step, all wait until the connection's time is over: a script that trains several models has "
        "to decide alike on all replicas which one it trains (not by enumerate(), which a joiner counts otherwise)",
        LONG_SECONDS,
    )
