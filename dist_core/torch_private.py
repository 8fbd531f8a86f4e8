"""Every call into torch that is not public API, in one place, each with the reason and a test.

Read in torch 2.13, and tried with 2.9, 2.11 and 2.15; an import with a later release says so. Models that are divided
among processes need 2.11. One that offers the same publicly (reconfigurable groups) replaces lines here only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store
from torch.autograd import Variable
from torch.distributed import Backend, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.data._utils import worker as data_worker
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dist_core.errors import InvalidTraining

TRIED_WITH = (2, 15)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
OLDEST_TO_DIVIDE = (2, 11)
"""Before, FSDP2 averages what it is told to sum, and stages send other sizes than their neighbours expect."""
GroupName: Any = getattr(distributed_c10d, "GroupName", str)
"""A string's own type in newer releases; torch 2.9 has none."""
_NOBODY_SENDS = 2**31 - 1
"""A tag."""

if RELEASE > TRIED_WITH:
    warnings.warn(
        f"elastune uses private APIs of torch and is tested with torch 2.9 to {TRIED_WITH[0]}.{TRIED_WITH[1]}; this "
        f"is torch {torch.__version__}, in which they may have changed. If training fails in dist_core, install "
        f"torch=={TRIED_WITH[0]}.{TRIED_WITH[1]}.*",
        stacklevel=2,
    )

# torch.distributed re-exports these at run time, but not to type checkers.
__all__ = ["GradBucket", "HashStore", "LoaderIterator", "PrefixStore", "Store"]


def refuse_to_divide_with_old_torch() -> None:
    """Raise InvalidTraining if this torch cannot divide a model among processes."""
    if RELEASE < OLDEST_TO_DIVIDE:
        raise InvalidTraining(
            "a replica of several slots holds a part of its model on each slot, which needs torch 2.11 or newer; "
            f"this is torch {torch.__version__}. Install torch>=2.11, or give the trial one slot per replica"
        )


def build_gloo_group(
    store: Store, *, rank: int, world_size: int, timeout: timedelta, name: str, host: str
) -> dist.ProcessGroup:
    """Return a process group beside the default one, so that two generations can exist at the same time.

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


def close_connections(group: dist.ProcessGroup) -> None:
    """End what is under way in a Gloo group, here and on the others that have not left it.

    ``abort()`` does nothing in Gloo. What does is an operation that runs out of time: that closes all connections, as
    if they had been lost, also one that nobody reads any more because the operation its data was for has failed.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NOBODY_SENDS).wait(timedelta(milliseconds=1))


def build_nccl_group(store: Store, *, rank: int, world_size: int, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Build a process group over NCCL, like ``build_gloo_group``.

    Its connections are made by the first collective; see ``connect_nccl_group``. A collective that does not end ends
    the process after a while, as torch is set up. These groups are left to us: what waits for one who is lost is
    aborted as soon as the round over Gloo, which fails at once, says so.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Else one that sees the loss before it is aborted waits a minute for others to write down what they did.
    quick = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", **quick):
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(GroupName(name))
    return group


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Read by a constructor only; what somebody has set already stays."""
    absent = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del os.environ[name]


def connect_nccl_group(group: dist.ProcessGroup) -> None:
    """Make the connections by one sum of one number, which shows that they work; collective. Raises RuntimeError."""
    group.allreduce([torch.zeros(1, device="cuda")]).wait()
    torch.cuda.current_stream().synchronize()


def close_nccl_group(group: dist.ProcessGroup) -> None:
    """End the connections, behind all that the device was given before; collective."""
    torch.cuda.synchronize()
    group.shutdown()


def replace_process_group(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let a wrapped model reduce over another group from the next step on; its buckets stay as they are."""
    have_a_layout = model._has_rebuilt_buckets
    model._update_process_group(group)  # type: ignore[no-untyped-call]  # not annotated in torch
    if have_a_layout:
        _log_layout(model)


def no_buffer_sync() -> dict[str, Any]:
    """Return DDP's keyword that leaves the model's buffers alone; its name changed after torch 2.11."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def sums_its_own_parameters(module: Any) -> bool:
    """Return whether FSDP holds parameters of this module that no module within it holds."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return bool(state._fsdp_param_groups)
    # One group, or none, up to torch 2.11.
    return state._fsdp_param_group is not None


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collectives on one tensor, by the names that they have since torch 2.13."""


def set_bucket_cap(model: DistributedDataParallel, megabytes: float) -> None:
    """Give a wrapped model buckets of another size. All ranks at the same step."""
    size = int(megabytes * 1024 * 1024)
    if hasattr(model, "_bucket_config"):  # since torch 2.13
        config = model._bucket_config
        first = min(size, config.first_bucket_bytes_cap)
        model._bucket_config = replace(
            config, bucket_bytes_cap=size, first_bucket_bytes_cap=first, per_bucket_bytes_caps=()
        )
    model.bucket_bytes_cap = size
    lay_out_anew(model)


def lay_out_anew(model: DistributedDataParallel) -> None:
    """Make buckets for the weights that require a gradient now: a new reducer, as after unpickling. All ranks."""
    parameters, expect_sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]  # not annotated in torch
    names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]  # not annotated in torch
    model._has_rebuilt_buckets = False
    model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)  # type: ignore[no-untyped-call]  # not annotated in torch
    if model.static_graph:
        model.reducer._set_static_graph()


def gradient_buckets(model: DistributedDataParallel) -> list[GradBucket]:
    """Return the buckets as they are laid out now, in the order of reduction.

    Within a backward pass this would hang.
    """
    return model.reducer._get_zeros_like_grad_buckets()


def layout_of_buckets(model: DistributedDataParallel) -> str | None:
    """Return which parameters lie in which bucket, by index; None until the order of gradients has settled it."""
    _log_layout(model)
    known: dict[str, str] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # not annotated in torch
    return known.get("rebuilt_per_bucket_param_indices")


def _log_layout(model: DistributedDataParallel) -> None:
    """Have DDP's log say how its buckets are now: it looks in some steps only, and notes changes that it sees."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # not annotated in torch
    model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]  # made with the reducer
    model._set_ddp_runtime_logging_sample_rate(_STEPS_A_LOOK)  # type: ignore[no-untyped-call]  # not annotated in torch


_STEPS_A_LOOK = 100
"""DDP's runtime logging sample rate, in steps; torch's default."""


def reduce_zeros(model: DistributedDataParallel) -> None:
    """Reduce gradients that are 0, as a backward pass does whose forward pass was or was not made."""
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = None
    model.reducer.prepare_for_backward([])
    torch.autograd.backward(trained, [torch.zeros_like(each) for each in trained])


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Lay the buckets out in the order in which gradients have come, if that is due; collective."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


def replace_default_group(group: dist.ProcessGroup | None) -> None:
    """Set the group that ``torch.distributed`` uses where a script names none; None for no group."""
    if group is None:
        distributed_c10d._world.pg_map.clear()
    else:
        note_group(group, "elastune")
    distributed_c10d._update_default_pg(group)


def note_group(group: dist.ProcessGroup, name: str, backend: str = Backend.GLOO) -> None:
    """Let ``torch.distributed`` know a group as it is now: its ranks are their own numbers."""
    world = distributed_c10d._world
    world.pg_map[group] = (backend, HashStore())
    world.pg_names[group] = GroupName(name)
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = "cpu:gloo,cuda:nccl" if backend == "nccl" else "cpu:gloo,cuda:gloo"
    world.pg_to_tag[group] = ""


def note_another_group(group: dist.ProcessGroup, backend: str = Backend.GLOO) -> None:
    """Let torch's own parts, too, find a group beside the default one by its name; once."""
    if knows_group(group):
        return
    note_group(group, group.group_name, backend)
    _distributed_c10d._register_process_group(group.group_name, group)


def knows_group(group: dist.ProcessGroup) -> bool:
    """Tell whether ``torch.distributed`` knows a group, which a script may have destroyed."""
    return group in distributed_c10d._world.pg_map


def give_new_groups(give: Callable[[Sequence[int] | None], dist.ProcessGroup | None]) -> None:
    """Have ``give`` answer ``torch.distributed.new_group(ranks)``; where it gives None, torch makes the group."""
    original = distributed_c10d._new_group_with_tag

    def new_group(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> Any:
        given = give(ranks)
        return original(ranks, *arguments, **options) if given is None else given

    distributed_c10d._new_group_with_tag = new_group


def mesh_of(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """Return the processes of a group as a mesh; torch's own function asks the default group for this one's rank."""
    note_another_group(group, group.name())
    ranks = torch.arange(group.size())
    if "_rank" in inspect.signature(DeviceMesh.__init__).parameters:
        mesh = DeviceMesh(device, ranks, _init_backend=False, _rank=group.rank())
    else:  # torch 2.9
        with as_default_group(group):
            mesh = DeviceMesh(device, ranks, _init_backend=False)
    mesh._dim_group_names = [group.group_name]
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry[group.group_name] = group
    return mesh


@contextlib.contextmanager
def as_default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` torch's default process group within this block."""
    note_another_group(group, group.name())
    before = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


def work_of(future: torch.futures.Future[Any]) -> dist.Work:
    """Return a future as the handle that a process group answers with."""
    work: dist.Work = _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # not in stubs
    return work


def after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when all gradients of the present backward pass are there, as DDP ends its reductions."""
    Variable._execution_engine.queue_callback(callback)


def storages_of(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """Return weak references to the memory of tensors, equal where two tensors share it."""
    strided = [each for each in tensors if each.layout is torch.strided]
    return {StorageWeakRef(each.untyped_storage()) for each in strided}  # type: ignore[no-untyped-call]  # not annotated in torch


def is_in_backward() -> bool:
    """Tell whether the caller runs within a backward pass, such as in a hook of a gradient."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors anywhere in lists, tuples, dicts and dataclasses: what DDP finds in a model's output."""
    return list(_find_tensors(value))  # type: ignore[no-untyped-call]  # not annotated in torch


def loss_scale_of(scaler: Any) -> torch.Tensor | None:
    """Return a copy of a gradient scaler's present scale, without waiting for a GPU.

    None when it does not scale.
    """
    return scaler._get_scale_async().clone() if scaler.is_enabled() and scaler._scale is not None else None


def schedules_within(schedule: Any) -> tuple[list[Any], list[int]]:
    """Return the schedules that a chained or sequential one consists of, and the steps at which the next one begins."""
    return schedule._schedulers, getattr(schedule, "_milestones", [])


def killed_data_workers(error: BaseException) -> list[int]:
    """Pids of the worker processes of any data loader that a signal has ended, of which ``error`` may be what is heard.

    torch raises the loss of one wherever the main thread is at that moment, as an error like any other. Where that is
    outside of the loader, the loop's iterator is gone by the time the error arrives, and only its text tells.
    """
    if told := _killed_workers_named_in(error):
        return told
    try:
        found = (each for each in gc.get_objects() if issubclass(type(each), _MultiProcessingDataLoaderIter))
        workers = [worker for iterator in found for worker in getattr(iterator, "_workers", [])]
        if workers:
            # Its end may be heard of over its connection before the kernel tells of it.
            time.sleep(0.1)
        return [worker.pid for worker in workers if worker.exitcode is not None and worker.exitcode < 0]
    except RuntimeError as raised:
        # Now the kernel told of it, and torch raised it here.
        return _killed_workers_named_in(raised)


def _killed_workers_named_in(error: BaseException) -> list[int]:
    pids: list[int] = []
    link: BaseException | None = error
    while link is not None:
        pids += [int(pid) for pid in re.findall(r"DataLoader worker \(pid (\d+)\) is killed by signal", str(link))]
        link = link.__cause__ or link.__context__
    return pids


class PartInfo(WorkerInfo):
    """Worker info of a dataset that reads one part of several; knows whether it was looked at."""

    def __getattribute__(self, name: str) -> Any:
        if name == "id":
            object.__setattr__(self, "was_asked", True)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name == "was_asked":
            return False
        raise AttributeError(name)


@contextlib.contextmanager
def reading_as(info: PartInfo) -> Iterator[None]:
    """Let this process be that data worker within the block."""
    before = data_worker._worker_info
    data_worker._worker_info = info
    try:
        yield
    finally:
        data_worker._worker_info = before


@functools.cache
def leave_uncompiled(package: str) -> None:
    """Have torch.compile break its graph at functions of this package, and go on within what they call."""
    # torch's compiler takes as long to import as the rest of torch; the first optimizer does it in any case.
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number for the memory that a tensor and its views share.

    It tells them apart on the meta device too, where none has an address.
    """
    return int(tensor.untyped_storage()._cdata)


def forget_scaled_step(scaler: Any) -> None:
    """Let a gradient scaler take a step anew that it began and that was given up."""
    scaler._per_optimizer_states.clear()


def times_written(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor that autograd has counted."""
    return int(tensor._version)
