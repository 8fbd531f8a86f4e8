"""The processes that torchrun started: one group of replicas, the same to the end."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup, consisting_of

TORCHRUN_SECONDS = 300.0
"""Longest wait for the other processes that torchrun started."""


def join_torchrun(rank: int, world_size: int) -> None:
    """Form torch's default group, unless there is one. Raises InvalidTraining when nobody answers."""
    if dist.is_initialized():
        return
    address = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
    try:
        # By the tensor's device, as torch itself chooses where it is given no backend.
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backends, timeout=timedelta(seconds=TORCHRUN_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise InvalidTraining(
            f"rank {rank} of {world_size} found nobody at MASTER_ADDR:MASTER_PORT {address} within "
            f"{TORCHRUN_SECONDS:.0f} s: {error}. Start all ranks with torchrun, or unset RANK and WORLD_SIZE to "
            "train alone"
        ) from error


def torchrun_part(rank: int, world_size: int, members: int, needs: GroupNeeds) -> ReplicaGroup:
    """Of the replicas that each consist of so many of these processes, in order of rank, this one's."""
    join_torchrun(rank, world_size)
    found = None
    for first in range(0, world_size, members):
        ranks = list(range(first, first + members))
        control = dist.new_group(ranks, backend="gloo")
        data = dist.new_group(ranks, backend="nccl" if needs.nccl else "gloo") if needs.apart else control
        if rank in ranks:
            found = ReplicaGroup(rank=rank - first, world_size=members, num_nodes=1, data=data, control=control)
    assert found is not None
    return found


def torchrun_group(rank: int, world_size: int, needs: GroupNeeds) -> ReplicaGroup:
    """The processes that torchrun started, which stay the same to the end. Raises InvalidTraining when none answers."""
    join_torchrun(rank, world_size)
    world = dist.group.WORLD
    assert world is not None
    # A script's own default group may be of any backend.
    control = world if world.name() == "gloo" else dist.new_group(backend="gloo")
    fast = "nccl" if needs.nccl else "gloo"
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
        extra_on_host=(dist.new_group(backend="gloo"),) if needs.extra_on_host else (),
        within_node=within,
        between_nodes=between,
    )
    if needs.members == 1:
        return whole
    alike = whole
    fast = "nccl" if needs.of_parts == {"nccl"} else "gloo"
    for member in range(needs.members):
        ranks = list(range(member, world_size, needs.members))
        made = dist.new_group(ranks, backend="gloo")
        data = dist.new_group(ranks, backend=fast) if needs.of_parts - {"host"} else made
        if rank in ranks:
            alike = ReplicaGroup(
                rank=ranks.index(rank), world_size=len(ranks), num_nodes=len(leaders), data=data, control=made
            )
    return consisting_of(whole, alike, needs)
