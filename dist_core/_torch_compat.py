"""Every call into torch that is not public API, in one place, each with the reason and a test.

Supported: torch 2.13. A newer release that offers the same publicly (reconfigurable groups) replaces lines here only.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

# torch.distributed re-exports these at run time, but not to type checkers.
__all__ = [
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "Store",
    "build_gloo_group",
    "build_nccl_group",
    "replace_process_group",
]


def build_gloo_group(
    store: Store, *, rank: int, world_size: int, timeout: timedelta, name: str, host: str
) -> dist.ProcessGroup:
    """A process group beside the default one, so that two generations can exist at the same time.

    ``init_process_group`` allows one default group and ``new_group`` needs all its members; neither fits a group that
    is built in the background while another one trains.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    if torch.cuda.is_available():
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(GroupName(name))
    return group


def build_nccl_group(store: Store, *, rank: int, world_size: int, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """The same over NCCL; errors are left to us (no watchdog that kills the process)."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(GroupName(name))
    return group


def replace_process_group(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let a wrapped model reduce over another group from the next step on; its buckets stay as they are."""
    model._update_process_group(group)  # type: ignore[no-untyped-call]  # not annotated in torch
