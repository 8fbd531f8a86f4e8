"""How a replica's examples are divided into microbatches of one size, as the memory that stages receive into has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """``count`` microbatches of ``size`` examples, from example ``first`` on."""

    first: int
    count: int
    size: int
    multiple_of: int
    """What the schedule wants its number of microbatches to be a multiple of."""

    @property
    def stop(self) -> int:
        return self.first + self.count * self.size


def divided(examples: int, most: int, num_stages: int, multiple_of: int) -> list[Division]:
    """At most ``most`` microbatches of all examples, and what is left over behind them.

    Where the examples can be divided evenly into no fewer microbatches than stages, nothing is.
    """
    even = [
        count
        for count in range(min(most, examples), num_stages - 1, -1)
        if examples % count == 0 and count % multiple_of == 0
    ]
    if even:
        return [Division(first=0, count=even[0], size=examples // even[0], multiple_of=multiple_of)]
    size = -(-examples // most)
    count = max(1, examples // size // multiple_of * multiple_of)
    found = [Division(first=0, count=count, size=size, multiple_of=multiple_of)]
    while found[-1].stop < examples:
        rest = examples - found[-1].stop
        taken = min(size, rest)
        found.append(Division(first=found[-1].stop, count=rest // taken, size=taken, multiple_of=multiple_of))
    return found
