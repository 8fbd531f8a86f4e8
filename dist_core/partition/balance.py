"""Cuts of a chain of blocks into stages: the exact minimum of the slowest stage under each device's memory.

A stage's time is that of its blocks and of what it sends across its last cut; its memory that of its parameters with
gradients and optimizer state, and of the activations of all microbatches that are in flight there (GPipe, Huang et al.,
NeurIPS'19: all of a step; PipeDream's one forward, one backward, SOSP'19: as many as there are stages from here to the
end; Narayanan et al., SC'21: interleaved, up to two rounds over the devices). Dynamic programming over (devices used,
blocks placed) finds the minimum over all contiguous cuts, and over all orders of unequal devices; a second pass takes,
of the partitions that are as fast, the one whose stages are most alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dist_core.errors import InvalidTraining
from dist_core.partition.blocks import BlockCosts, StageDevice, tied_together

Floats = npt.NDArray[np.float64]
Schedule = Literal["simple", "1f1b", "interleaved"]
"""All forward passes first, then all backward passes; or each backward pass as soon as it can be, with one stage a
device or with several in rounds."""

_SAME = 1e-9
"""Relative difference below which two partitions are equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """Terms of a pipeline that matter to where its cuts lie."""

    microbatches: int
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Stages of each device."""
    link_bytes_per_second: float = math.inf
    state_factor: float = 4.0
    """Bytes a parameter needs in all, of its own: weights, gradients and, for Adam, two moments."""
    memory_weight: float = 0.0
    """Weight from 0, where the slowest stage counts, to 1, where the fullest does."""

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise InvalidTraining(f"microbatches is {self.microbatches}; it must be at least 1")
        if self.schedule not in get_args(Schedule):
            raise InvalidTraining(f"schedule is {self.schedule!r}; choose one of {', '.join(get_args(Schedule))}")
        if not 0.0 <= self.memory_weight <= 1.0:
            raise InvalidTraining(f"memory_weight is {self.memory_weight}; it must lie between 0 and 1")
        if not self.link_bytes_per_second > 0.0 or not self.state_factor >= 1.0:
            raise InvalidTraining(
                f"link_bytes_per_second is {self.link_bytes_per_second} and state_factor is {self.state_factor}; "
                "link_bytes_per_second must be above 0 and state_factor at least 1"
            )

    def in_flight(self, index: int, num_stages: int) -> int:
        """Microbatches whose activations the stage of that index keeps at once."""
        if self.schedule == "simple":
            return self.microbatches
        devices = num_stages // self.chunks
        if self.schedule == "interleaved":
            return min(self.microbatches, devices if index >= num_stages - devices else 2 * devices)
        return min(self.microbatches, num_stages - index)

    def device_of(self, index: int, num_stages: int) -> int:
        """Return the device that holds the stage of that index."""
        return index % (num_stages // self.chunks)


@dataclass(frozen=True, slots=True)
class Stage:
    device: StageDevice
    blocks: tuple[BlockCosts, ...]
    seconds: float
    """Seconds for one microbatch."""
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Partition:
    stages: tuple[Stage, ...]
    bound_seconds: float
    """No partition of these blocks has a slowest stage that is faster."""

    @property
    def slowest_seconds(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the blocks that a stage begins with, but for the first stage."""
        return tuple(stage.blocks[0].name for stage in self.stages[1:])


def partition(
    blocks: Sequence[BlockCosts],
    devices: Sequence[StageDevice],
    terms: PipelineTerms,
    *,
    ties: Sequence[Sequence[str]] = (),
) -> Partition:
    """Return the best partition with a stage for each device; ``devices`` may be used in any order.

    ``ties``: names of blocks that share a parameter, which have to lie on one device. Raises InvalidTraining where
    there are fewer blocks, or microbatches, than stages, or where no partition fits into the devices' memory.
    """
    _refuse_what_has_no_pipeline(blocks, devices, terms)
    costs = _Costs(blocks, terms, len(devices), tied_together(blocks, ties))
    alike: dict[tuple[float, float], list[StageDevice]] = {}
    for device in devices:
        alike.setdefault((device.speed, device.memory_bytes), []).append(device)
    groups = list(alike.values())
    kinds, counts = [group[0] for group in groups], tuple(map(len, groups))
    best = _least(costs, kinds, counts, worst=math.inf)
    if not math.isfinite(best.value):
        raise InvalidTraining(_why_none_is_possible(blocks, devices, costs))
    chosen = _least(costs, kinds, counts, worst=best.value * (1.0 + _SAME))
    return _described(blocks, chosen.edges, [groups[kind].pop(0) for kind in chosen.order], costs)


def partition_at(
    blocks: Sequence[BlockCosts], cuts: Sequence[str], devices: Sequence[StageDevice], terms: PipelineTerms
) -> Partition:
    """Return the partition whose stages begin at these blocks, in the order of the devices. Raises InvalidTraining."""
    names = [block.name for block in blocks]
    unknown = [cut for cut in cuts if cut not in names[1:]]
    if unknown:
        raise InvalidTraining(
            f"a stage cannot begin with {unknown[0]!r}, which is not one of the blocks after the first; the blocks "
            f"are {', '.join(names)}"
        )
    edges = [0, *(names.index(cut) for cut in cuts), len(names)]
    if any(first >= second for first, second in pairwise(edges)) or len(edges) != len(devices) + 1:
        raise InvalidTraining(
            f"the cuts are {list(cuts)!r} for {len(devices)} devices; there must be one cut less than devices, each "
            "cut once and in the order of the blocks"
        )
    _refuse_what_has_no_pipeline(blocks, devices, terms)
    return _described(blocks, edges, devices, _Costs(blocks, terms, len(devices), []))


def _refuse_what_has_no_pipeline(
    blocks: Sequence[BlockCosts], devices: Sequence[StageDevice], terms: PipelineTerms
) -> None:
    if not 1 <= len(devices) <= len(blocks):
        raise InvalidTraining(
            f"{len(blocks)} blocks cannot be cut into {len(devices)} stages; there must be at least one stage, and "
            "at least one block per stage"
        )
    if terms.schedule != "simple" and terms.microbatches < len(devices):
        raise InvalidTraining(
            f"microbatches is {terms.microbatches} for {len(devices)} stages; with fewer microbatches than stages, "
            "some stages would always be idle. Use more microbatches, or fewer stages"
        )


class _Costs:
    """Costs of every contiguous range of blocks at once: entry [i, j] is for blocks i to j - 1."""

    def __init__(
        self, blocks: Sequence[BlockCosts], terms: PipelineTerms, num_stages: int, together: Sequence[tuple[int, int]]
    ) -> None:
        self._terms = terms
        self.num_stages = num_stages
        self.size = len(blocks)
        self._seconds = _ranges([block.seconds for block in blocks])
        self._state = terms.state_factor * _ranges([block.parameter_bytes for block in blocks])
        self._activations = _ranges([block.activation_bytes for block in blocks])
        sent = np.array([0.0, *(2.0 * block.output_bytes / terms.link_bytes_per_second for block in blocks)])
        sent[-1] = 0.0
        self._sent = sent
        self._forbidden = np.tril(np.ones((self.size + 1, self.size + 1), dtype=bool))
        for first, last in together:
            # A stage may begin or end at no edge between the two.
            self._forbidden[first + 1 : last + 1, :] = True
            self._forbidden[:, first + 1 : last + 1] = True

    @property
    def num_edges(self) -> int:
        """Places where a stage may begin or end."""
        return int((~self._forbidden[0, 1:]).sum()) + 1

    def seconds(self, device: StageDevice) -> Floats:
        found: Floats = self._seconds / device.speed + self._sent[None, :]
        return found

    def memory(self, index: int) -> Floats:
        return self._state + self._terms.in_flight(index, self.num_stages) * self._activations

    def of_stage(self, index: int, device: StageDevice) -> Floats:
        """Return the cost to minimize.

        Infinite for an impossible stage: out of order, tied across its end, or too large.
        """
        seconds, memory = self.seconds(device), self.memory(index)
        weight = self._terms.memory_weight
        cost = seconds
        if weight > 0.0:
            # Each relative to an even share of the whole, so that they can be weighed.
            mean_seconds = max(float(self._seconds[0, -1]) / self.num_stages, 1e-30)
            mean_memory = max(float(self.memory(0)[0, -1]) / self.num_stages, 1e-30)
            cost = (1.0 - weight) * seconds / mean_seconds + weight * memory / mean_memory
        found: Floats = np.where(self._forbidden | (memory > device.memory_bytes), np.inf, cost)
        return found


def _ranges(values: Sequence[float]) -> Floats:
    """Return sums of all contiguous ranges."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    found: Floats = sums[None, :] - sums[:, None]
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    value: float
    edges: list[int]
    """Edges of the stages, the first block's and the end among them."""
    order: list[int]
    """Kind of each stage's device."""


def _least(costs: _Costs, kinds: Sequence[StageDevice], counts: tuple[int, ...], *, worst: float) -> _Found:
    """Return the least maximum over all partitions.

    With a finite ``worst``, the least sum of squares of those within it.
    """
    start = (0,) * len(kinds)
    nothing = np.full(costs.size + 1, np.inf)
    nothing[0] = 0.0
    best: dict[tuple[int, ...], Floats] = {start: nothing}
    came: dict[tuple[int, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    # In the order of how many devices are used.
    for used in sorted(product(*(range(count + 1) for count in counts)), key=sum)[1:]:
        values = np.full(costs.size + 1, np.inf)
        sources = np.zeros(costs.size + 1, dtype=np.int64)
        by_kind = np.zeros(costs.size + 1, dtype=np.int64)
        for kind, device in enumerate(kinds):
            before = (*used[:kind], used[kind] - 1, *used[kind + 1 :])
            if used[kind] == 0 or before not in best:
                continue
            stage = costs.of_stage(sum(used) - 1, device)
            if math.isfinite(worst):
                reached = best[before][:, None] + np.where(stage <= worst, stage, np.inf) ** 2
            else:
                reached = np.maximum(best[before][:, None], stage)
            source = reached.argmin(axis=0)
            least = reached[source, np.arange(costs.size + 1)]
            better = least < values
            values[better], sources[better], by_kind[better] = least[better], source[better], kind
        best[used], came[used] = values, (sources, by_kind)
    if not math.isfinite(best[counts][-1]):
        return _Found(math.inf, [], [])
    edges, order, used = [costs.size], list[int](), counts
    while sum(used) > 0:
        sources, by_kind = came[used]
        kind = int(by_kind[edges[0]])
        edges.insert(0, int(sources[edges[0]]))
        order.insert(0, kind)
        used = (*used[:kind], used[kind] - 1, *used[kind + 1 :])
    return _Found(float(best[counts][-1]), edges, order)


def _described(
    blocks: Sequence[BlockCosts], edges: Sequence[int], devices: Sequence[StageDevice], costs: _Costs
) -> Partition:
    stages = []
    for index, ((first, stop), device) in enumerate(zip(pairwise(edges), devices, strict=True)):
        seconds, memory = costs.seconds(device)[first, stop], costs.memory(index)[first, stop]
        stages.append(Stage(device, tuple(blocks[first:stop]), float(seconds), float(memory)))
    fastest = max(device.speed for device in devices)
    even = sum(block.seconds for block in blocks) / sum(device.speed for device in devices)
    return Partition(tuple(stages), max(even, max(block.seconds for block in blocks) / fastest))


def _why_none_is_possible(blocks: Sequence[BlockCosts], devices: Sequence[StageDevice], costs: _Costs) -> str:
    most_stages = costs.num_edges - 1
    if most_stages < len(devices):
        return (
            f"the {len(blocks)} blocks can be cut into at most {most_stages} stages, because blocks that share a "
            f"parameter must be on one device, but there are {len(devices)} devices. Untie those weights, or use "
            "fewer devices"
        )
    last = costs.memory(costs.num_stages - 1)
    alone = [(float(last[index, index + 1]), block.name) for index, block in enumerate(blocks)]
    largest, name = max(alone)
    room = max(device.memory_bytes for device in devices)
    needed, whole = float(last[0, -1]), sum(device.memory_bytes for device in devices)
    if largest > room:
        return (
            f"the block {name!r} alone needs {largest / 1e9:.3g} GB and the largest device has {room / 1e9:.3g} GB; "
            "cut the model into smaller blocks, recompute its activations, or take larger devices"
        )
    return (
        f"no partition into {len(devices)} stages fits: the model needs at least {needed / 1e9:.3g} GB in stages "
        f"that keep whole blocks, and the devices have {whole / 1e9:.3g} GB. Take more devices, smaller microbatches, "
        "or recompute activations"
    )
