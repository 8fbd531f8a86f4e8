"""Cutting models into stages: the slowest stage against the lower bound, and against the cuts that people make.

Blocks are measured on this machine, and so is each stage of the partition that is found, in turn with the blocks'
measurements: the prediction is the sum of what its blocks took. Cuts to compare with: equal counts of blocks, equal
parameters, and the usual hand split (embedding and head count as one layer each).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.frame import Measurement
from dist_core.larger.stages import stages_of
from dist_core.partition.balance import PipelineTerms, partition, partition_at
from dist_core.partition.blocks import BlockCosts, StageDevice
from dist_core.partition.measure import measure_blocks

STAGES = (2, 4, 8)
TERMS = PipelineTerms(microbatches=16)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int = 128, words: int = 4096) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, stride=stride, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.skip: nn.Module = nn.Identity() if same else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet() -> nn.Sequential:
    """Return a ResNet-34 for images of 64 x 64."""
    blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    before = 32
    for width, count, stride in ((32, 3, 1), (64, 4, 2), (128, 6, 2), (256, 3, 2)):
        for index in range(count):
            blocks.append(Residual(before, width, stride if index == 0 else 1))
            before = width
    blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)))
    return nn.Sequential(*blocks)


def models() -> dict[str, tuple[nn.Module, list[str], torch.Tensor]]:
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, list[str], torch.Tensor]] = {}
    for layers in (24, 96):
        names = ["embedding", *(f"layers.{index}" for index in range(layers)), "head"]
        found[f"GPT of {layers} layers"] = (GPT(layers), names, torch.randint(4096, (4, 64)))
    image = resnet()
    found["ResNet of 34 layers"] = (image, [str(index) for index in range(len(image))], torch.randn(4, 3, 64, 64))
    return found


def by_count(blocks: Sequence[BlockCosts], stages: int) -> list[int]:
    return [int(part[0]) for part in np.array_split(np.arange(len(blocks)), stages)][1:]


def by_weight(weights: Sequence[float], stages: int) -> list[int]:
    """Cut where the running sum comes nearest to each stage's share."""
    sums = np.cumsum(weights)
    cuts: list[int] = []
    for stage in range(1, stages):
        nearest = int(np.abs(sums - sums[-1] * stage / stages).argmin()) + 1
        lowest, highest = (cuts[-1] if cuts else 0) + 1, len(weights) - (stages - stage)
        cuts.append(min(max(nearest, lowest), highest))
    return cuts


RIVALS: dict[str, Callable[[Sequence[BlockCosts], int], list[int]]] = {
    "equal counts": by_count,
    "equal parameters": lambda blocks, stages: by_weight([block.parameter_bytes + 1 for block in blocks], stages),
    "hand": lambda blocks, stages: by_weight([1.0] * len(blocks), stages),
}


def seconds_of(model: nn.Module, names: Sequence[str], x: torch.Tensor, cuts: Sequence[str]) -> list[float]:
    """Return the seconds of each stage, measured as one block."""
    blocks = [BlockCosts(name=name, forward_seconds=0, backward_seconds=0) for name in names]
    found = partition_at(blocks, cuts, [StageDevice()] * (len(cuts) + 1), TERMS)
    chain = nn.Sequential(*stages_of(model, names, found))
    return [each.seconds for each in measure_blocks(chain, [str(index) for index in range(len(chain))], x, repeats=9)]


def measure() -> list[Measurement]:
    torch.set_num_threads(1)
    rows = []
    for title, (model, names, x) in models().items():
        blocks = measure_blocks(model, names, x, repeats=9)
        for stages in STAGES:
            devices = [StageDevice()] * stages
            found = partition(blocks, devices, TERMS)
            rivals = {}
            for rival, cut in RIVALS.items():
                cuts = [names[index] for index in cut(blocks, stages)]
                rivals[rival] = 1e3 * partition_at(blocks, cuts, devices, TERMS).slowest_seconds
            ours, bound = 1e3 * found.slowest_seconds, 1e3 * found.bound_seconds
            rows.append(_row(f"{title} in {stages}", ours, bound, "the lower bound", 1.03, stages=found.cuts))
            best = min(rivals, key=rivals.__getitem__)
            rows.append(
                _row(f"{title} in {stages}", ours, rivals[best], f"{best}, the best of the others", 1.0, **rivals)
            )
            measured = 1e3 * max(seconds_of(model, names, x, found.cuts))
            rows.append(_row(f"{title} in {stages}, predicted", ours, measured, "its slowest stage, measured", None))
    rows.append(_time_to_cut())
    return rows


def _row(what: str, ours: float, peer: float, peer_name: str, target: float | None, **details: object) -> Measurement:
    return Measurement(
        what=what, ours=ours, peer=peer, unit="ms", peer_name=peer_name, target=target, details=dict(details)
    )


def _time_to_cut() -> Measurement:
    order = np.random.default_rng(0)
    blocks = [
        BlockCosts(
            name=str(index),
            forward_seconds=float(order.lognormal()),
            backward_seconds=float(order.lognormal()),
            parameter_bytes=int(order.integers(10**6)),
            activation_bytes=int(order.integers(10**6)),
            output_bytes=int(order.integers(10**6)),
        )
        for index in range(100)
    ]
    took = []
    for _ in range(31):
        began = time.perf_counter()
        partition(blocks, [StageDevice(memory_bytes=1e9)] * 8, TERMS)
        took.append(time.perf_counter() - began)
    ours = 1e3 * statistics.median(took)
    return Measurement(
        what="100 blocks into 8 stages", ours=ours, peer=10.0, unit="ms", peer_name="a limit of 10 ms", target=1.0
    )
