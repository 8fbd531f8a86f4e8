"""Division of a replica's examples into microbatches of one size, to fit the memory that stages receive into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dist_core.partition.balance import Partition, PipelineTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """``count`` microbatches of ``size`` examples each, of the examples from ``first`` on."""

    first: int
    count: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.count * self.size


def largest_microbatch(found: Partition, terms: PipelineTerms, room: float) -> int | None:
    """Examples of a microbatch for which every stage has memory, at least 1; None where nothing limits them.

    ``found``: of blocks as they are for one example; ``room``: bytes of a stage's device.
    """
    most = math.inf
    for index, stage in enumerate(found.stages):
        kept = sum(block.activation_bytes for block in stage.blocks) * terms.in_flight(index, len(found.stages))
        fixed = terms.state_factor * sum(block.parameter_bytes for block in stage.blocks)
        if kept:
            most = min(most, (room - fixed) / kept)
    return None if math.isinf(most) else max(1, int(most))


def divided(examples: int, most: int, num_stages: int, multiple_of: int, largest: int | None = None) -> list[Division]:
    """Divide all examples into at most ``most`` microbatches, and a rest behind them.

    There is no rest where the examples can be divided evenly into no fewer microbatches than stages. ``multiple_of``:
    what the schedule wants their number to be divisible by. There are more than ``most`` where memory has room for
    ``largest`` examples in one.
    """
    least = 1 if largest is None else -(-examples // largest)
    most = max(most, least)
    even = [
        count
        for count in range(min(most, examples), max(num_stages, least) - 1, -1)
        if examples % count == 0 and count % multiple_of == 0
    ]
    if even:
        return [Division(first=0, count=even[0], size=examples // even[0])]
    size = -(-examples // most)
    count = examples // size // multiple_of * multiple_of or examples // size
    divisions = [Division(first=0, count=count, size=size)]
    while divisions[-1].stop < examples:
        rest = examples - divisions[-1].stop
        taken = min(size, rest)
        divisions.append(Division(first=divisions[-1].stop, count=rest // taken, size=taken))
    return divisions
