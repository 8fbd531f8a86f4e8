"""Step time of AdaptiveDataParallel with its loader against plain DDP with DataLoader: two Gloo ranks, one thread each.

Both train the same model on the same data in the same processes, in alternating blocks; the figure is the median of
the paired ratios. The noise scale is measured on every step, or on every tenth. ``MALLOC_MMAP_MAX_=0`` in the
environment keeps freed memory in the process: page faults of large temporaries weigh less.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.frame import Measurement
from benchmarks.ranks import run_ranks
from dist_core.device import device_of

ROUNDS = 30
BLOCK = 6
CASES = (
    (2, "SGD", 1, 1.05),
    (2, "SGD", 10, 1.01),
    (2, "AdamW", 1, 1.15),
    (2, "AdamW", 10, 1.02),
    (1, "SGD", 10, 1.05),
)
"""Replicas, optimizer, steps between measurements of the noise scale, largest ratio to the peer's step time."""


def cnn() -> tuple[nn.Module, tuple[int, ...], int, int]:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 2)):
        layers += [nn.Conv2d(before, after, 3, padding=1, stride=stride), nn.BatchNorm2d(after), nn.ReLU()]
    return (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10)),
        (3, 32, 32),
        32,
        10,
    )


def mlp() -> tuple[nn.Module, tuple[int, ...], int, int]:
    """10 million parameters."""
    wide = 2048
    layers = [nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(wide, 10)), (784,), 64, 10


def transformer() -> tuple[nn.Module, tuple[int, ...], int, int]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(32 * 128, 10)), (32, 128), 16, 10


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...], int, int]]] = {
    "CNN": cnn,
    "MLP 10M": mlp,
    "transformer": transformer,
}


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
}


def _plain(
    name: str, optimizer_name: str, data: TensorDataset, local_batch: int, world_size: int, place: torch.device
) -> Iterator[None]:
    torch.manual_seed(0)
    model = MODELS[name]()[0].to(place)
    optimizer = OPTIMIZERS[optimizer_name](model)
    wrapped: nn.Module = model
    sampler: DistributedSampler[Any] | None = None
    if world_size > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(data, world_size, dist.get_rank())
    loader: DataLoader[Any] = DataLoader(data, batch_size=local_batch, sampler=sampler, shuffle=sampler is None)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.to(place)), y.to(place)).backward()
            optimizer.step()
            yield


def _ours(
    name: str,
    optimizer_name: str,
    data: TensorDataset,
    local_batch: int,
    world_size: int,
    place: torch.device,
    every: int,
) -> Iterator[None]:
    from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
    from dist_core.trial.current import reset_core

    reset_core()
    torch.manual_seed(0)
    model = MODELS[name]()[0].to(place)
    optimizer = OPTIMIZERS[optimizer_name](model)
    loader = AdaptiveDataLoader(data, batch_size=local_batch * world_size, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer, noise_every=every)
    for _ in remaining_epochs_until(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x.to(place)), y.to(place)).backward()
            optimizer.step()
            yield


def _place(kind: str, rank: int, world_size: int) -> torch.device:
    """This rank's; where there are fewer GPUs than ranks, all are on the first one."""
    if kind == "cpu":
        return torch.device("cpu")
    shared = torch.cuda.device_count() < world_size
    if shared:
        os.environ["ELASTUNE_GPU_SHARE"] = str(0.9 / world_size)
    place = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(place)
    return place


def _times(
    rank: int, world_size: int, name: str, optimizer_name: str, every: int, kind: str
) -> dict[str, dict[str, list[float]]]:
    place = _place(kind, rank, world_size)
    device = device_of(place)
    _, shape, local_batch, classes = MODELS[name]()
    count = local_batch * world_size * 40
    data = TensorDataset(torch.randn(count, *shape), torch.randint(classes, (count,)))
    variants = {
        "plain": _plain(name, optimizer_name, data, local_batch, world_size, place),
        "ours": _ours(name, optimizer_name, data, local_batch, world_size, place, every),
    }
    for steps in variants.values():
        for _ in range(8):
            next(steps)
    wall: dict[str, list[float]] = {variant: [] for variant in variants}
    cpu: dict[str, list[float]] = {variant: [] for variant in variants}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for variant in order.sample(list(variants), len(variants)):
            dist.barrier()
            device.mark().wait()
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                next(variants[variant])
            device.mark().wait()
            wall[variant].append((time.perf_counter() - began) / BLOCK)
            cpu[variant].append((time.process_time() - began_cpu) / BLOCK)
    return {"wall": wall, "cpu": cpu}


def _median_ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(ours / plain for ours, plain in zip(times["ours"], times["plain"], strict=True))


def measure(models: Sequence[str] = tuple(MODELS), kind: str = "cpu") -> list[Measurement]:
    """``kind``: cpu or cuda, where the models are trained."""
    rows = []
    for name in models:
        for world_size, optimizer_name, every, target in CASES:
            times = run_ranks(_times, world_size, name, optimizer_name, every, kind)
            peer_name = "DDP + DataLoader" if world_size > 1 else "plain PyTorch"
            for clock in ("wall", "cpu"):
                peer = 1e3 * statistics.median(times[clock]["plain"])
                rows.append(
                    Measurement(
                        what=f"{name} on {kind}, {world_size} replicas, {optimizer_name}, noise every {every}, {clock}",
                        ours=peer * _median_ratio(times[clock]),
                        peer=peer,
                        unit="ms",
                        peer_name=peer_name,
                        target=target,
                        details={"MALLOC_MMAP_MAX_": os.environ.get("MALLOC_MMAP_MAX_")},
                    )
                )
                print(rows[-1].what, f"{rows[-1].ratio:.3f} (target {target})", flush=True)
    return rows
