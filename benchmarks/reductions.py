"""Reduction strategies on one bucket: time on 2 and 4 Gloo ranks against one plain all-reduce in the same processes."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from datetime import timedelta

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so

from benchmarks.frame import Measurement
from benchmarks.ranks import run_ranks
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import build_group
from dist_core.gradients.choice import CLEARLY_FASTER
from dist_core.gradients.reduce import Bucket, reduction_strategy
from dist_core.torch_private import GradBucket

NAMES = ("all_reduce", "round_robin", "sharded", "hierarchical", "bf16", "fp16")
MEGABYTES = (1, 8, 25)
ROUNDS = 25


def _no_layout() -> GradBucket:
    raise AssertionError("none of these looks at the layout")


def _times(rank: int, world_size: int, meeting_place: str) -> dict[str, list[float]]:
    store = FileStore(meeting_place, world_size)
    nodes = [f"node-{index // 2}" for index in range(world_size)]
    needs = GroupNeeds(extra=2, by_node=True)
    group = build_group(store, name="bench", rank=rank, nodes=nodes, timeout=timedelta(seconds=60), needs=needs)
    strategies = {name: reduction_strategy(name) for name in NAMES}
    for strategy in strategies.values():
        strategy.enter(group)
    times: dict[str, list[float]] = {}
    order = random.Random(0)
    for megabytes in MEGABYTES:
        # Four buckets in flight, as a backward pass has them.
        buffers = [torch.randn(megabytes * 1024 * 256) for _ in range(4)]
        for _ in range(ROUNDS):
            for name in order.sample(NAMES, len(NAMES)):
                group.control.barrier().wait()
                began = time.perf_counter()
                futures = [
                    strategies[name].reduce(Bucket(index, buffer, _no_layout)) for index, buffer in enumerate(buffers)
                ]
                for future in futures:
                    future.wait()
                times.setdefault(f"{name} {megabytes}", []).append(time.perf_counter() - began)
                for buffer in buffers:
                    buffer.mul_(1.0 / world_size)
    return times


def measure() -> list[Measurement]:
    rows = []
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            times = run_ranks(_times, world_size, f"{folder}/store")
        for megabytes in MEGABYTES:
            plain = times[f"all_reduce {megabytes}"]
            medians = {name: statistics.median(times[f"{name} {megabytes}"]) for name in NAMES}
            for name in NAMES[1:]:
                ratio = statistics.median(
                    ours / theirs for ours, theirs in zip(times[f"{name} {megabytes}"], plain, strict=True)
                )
                rows.append(
                    Measurement(
                        what=f"{name}, {world_size} ranks, 4 x {megabytes} MB",
                        ours=1e3 * medians["all_reduce"] * ratio,
                        peer=1e3 * medians["all_reduce"],
                        unit="ms",
                        peer_name="all_reduce",
                        target=1 / 1.2 if (name, world_size, megabytes) == ("bf16", 4, 25) else None,
                    )
                )
            # What tuning over all of them keeps: another one only if it is clearly faster.
            best = min(NAMES, key=medians.__getitem__)
            kept = best if medians[best] < CLEARLY_FASTER * medians["all_reduce"] else "all_reduce"
            rows.append(
                Measurement(
                    what=f"the one that tuning keeps ({kept}), {world_size} ranks, 4 x {megabytes} MB",
                    ours=1e3 * medians[kept],
                    peer=1e3 * medians["all_reduce"],
                    unit="ms",
                    peer_name="all_reduce",
                    target=1.02,
                )
            )
    return rows
