"""The processes that torchrun or mpirun started: one group of replicas, the same to the end."""

from __future__ import annotations

import atexit
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup, consisting_of
from dist_core.link.environment import started_by_mpirun

TORCHRUN_SECONDS = 300.0
"""Longest wait for the other processes that torchrun started."""
THREADS_SECONDS = 0.02
"""Seconds for Gloo's threads to forget the last collective, which holds Python objects."""


def join_torchrun(rank: int, world_size: int) -> None:
    """Form torch's default group, unless there is one. Raises InvalidTraining when nobody answers."""
    if dist.is_initialized():
        return
    address = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
    backends = backends_for(
        mpirun=started_by_mpirun() and "MASTER_ADDR" not in os.environ,
        mpi=dist.is_mpi_available(),
        gpus=torch.cuda.is_available() and dist.is_nccl_available(),
    )
    # Before the interpreter ends, not while: a thread of Gloo's that then asks for the interpreter ends the process.
    atexit.register(time.sleep, THREADS_SECONDS)
    try:
        if backends == "mpi":
            # It knows its processes by itself, and waits for them as long as it takes.
            dist.init_process_group(backends)
            return
        timeout = timedelta(seconds=TORCHRUN_SECONDS)
        dist.init_process_group(backends, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise InvalidTraining(
            f"rank {rank} of {world_size} could not meet the other ranks at MASTER_ADDR:MASTER_PORT {address} "
            f"(timeout {TORCHRUN_SECONDS:.0f} s): {error}. Start all ranks with torchrun, or unset RANK and "
            "WORLD_SIZE to train alone"
        ) from error


def backends_for(*, mpirun: bool, mpi: bool, gpus: bool) -> str:
    """Return the backends that ranks talk over, given whether mpirun started them and torch was built with MPI.

    Raises InvalidTraining where ranks of mpirun would not find each other.
    """
    # By the tensor's device, as torch itself chooses where it is given no backend.
    usual = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    if not mpirun:
        return usual
    if gpus or not mpi:
        lacks = "NCCL, which GPUs need" if gpus else "Gloo, because this torch was built without MPI"
        raise InvalidTraining(
            f"mpirun started these ranks without MASTER_ADDR, but they must meet at an address to use {lacks}. Pass "
            "one to all of them: mpirun -x MASTER_ADDR=<address of rank 0's host> -x MASTER_PORT=29500 ..."
        )
    return "mpi"


def torchrun_part(rank: int, world_size: int, members: int, needs: GroupNeeds) -> ReplicaGroup:
    """Return this process's replica, where each replica consists of ``members`` processes in order of rank."""
    join_torchrun(rank, world_size)
    part = None
    for first in range(0, world_size, members):
        ranks = list(range(first, first + members))
        control = dist.new_group(ranks, backend=_host_backend())
        data = dist.new_group(ranks, backend="nccl" if needs.nccl else _host_backend()) if needs.apart else control
        if rank in ranks:
            part = ReplicaGroup(rank=rank - first, world_size=members, num_nodes=1, data=data, control=control)
    assert part is not None
    return part


def _host_backend() -> str:
    """Return the backend between CPUs: MPI where the processes have met over it and over nothing else, else Gloo."""
    return "mpi" if dist.get_backend() == "mpi" else "gloo"


def torchrun_group(rank: int, world_size: int, needs: GroupNeeds) -> ReplicaGroup:
    """Return the processes that torchrun started, which stay the same to the end.

    Raises InvalidTraining when none answers.
    """
    join_torchrun(rank, world_size)
    world = dist.group.WORLD
    assert world is not None
    # A script's own default group may be of any backend.
    host = _host_backend()
    control = world if world.name() == host else dist.new_group(backend=host)
    fast = "nccl" if needs.nccl else host
    data = dist.new_group(backend=fast) if needs.apart else control
    plain = ReplicaGroup(rank=rank, world_size=world_size, num_nodes=1, data=data, control=control)
    nodes: list[str] = plain.gather_json(socket.gethostname())
    local = [index for index, node in enumerate(nodes) if node == nodes[rank]]
    leaders = sorted({nodes.index(node) for node in nodes})
    within = between = None
    if needs.by_node:
        # Every process has to take part in making every group.
        for leader in leaders:
            members = [index for index, node in enumerate(nodes) if node == nodes[leader]]
            made = dist.new_group(members, backend=fast)
            within = made if leader == local[0] and len(members) > 1 else within
        made = dist.new_group(leaders, backend=fast)
        between = made if rank in leaders and len(leaders) > 1 else None
    whole = replace(
        plain,
        num_nodes=len(leaders),
        extra=tuple(dist.new_group(backend=fast) for _ in range(needs.extra)),
        within_node=within,
        between_nodes=between,
    )
    if needs.members == 1:
        return whole
    data_parallel = whole
    fast = "nccl" if needs.of_parts == {"nccl"} else host
    for member in range(needs.members):
        ranks = list(range(member, world_size, needs.members))
        made = dist.new_group(ranks, backend=host)
        data = dist.new_group(ranks, backend=fast) if needs.of_parts - {"host"} else made
        if rank in ranks:
            data_parallel = ReplicaGroup(
                rank=ranks.index(rank), world_size=len(ranks), num_nodes=len(leaders), data=data, control=made
            )
    return consisting_of(whole, data_parallel, needs)
