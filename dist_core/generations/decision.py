"""Decision to move to the next generation: pure, and the same on every rank.

Each optimizer step the replicas sum a small vector. Three of its slots say who has prepared which generation: the
count, the sum of the numbers and the sum of their squares. All have prepared the same one if the count is the world
size and ``world * sum of squares == (sum)^2`` (Cauchy-Schwarz holds with equality only for equal numbers). Since
every rank sees the same sums, every rank decides alike at the same step boundary; no extra round is needed.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass


def short_checksum(content: bytes) -> int:
    """16 bits, few enough for exact sums of squares over a thousand replicas."""
    return zlib.crc32(content) & 0xFFFF


def fingerprint(numbers: Sequence[float]) -> int:
    """Return a short checksum that differs if the numbers do."""
    return short_checksum(struct.pack(f"{len(numbers)}d", *numbers))


def all_equal(total: float, squares: float, world_size: int) -> bool:
    """Tell whether all replicas gave one number, from the sum and the sum of squares."""
    return world_size * squares == total**2


def vote_for(number: int | None) -> tuple[float, float, float]:
    """Return a replica's part of the sums that ``all_vote_alike`` reads; None: it has nothing to vote for."""
    return (0.0, 0.0, 0.0) if number is None else (1.0, float(number), float(number) ** 2)


def all_vote_alike(count: float, total: float, squares: float, world_size: int) -> bool:
    """Tell whether all replicas have voted, and for one number, from the sums of what ``vote_for`` returned."""
    return round(count) == world_size and all_equal(total, squares, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGeneration:
    """A set of replicas as the scheduler published it; a replica's rank is its index among the members."""

    number: int
    members: tuple[str, ...]
    nodes: tuple[str, ...]
    """Node of each member, by rank."""
    join_epoch: int | None
    """Epoch at which the joiners stand waiting; None when nobody joins or nobody trains yet."""

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"generation {self.number} names a replica twice: {self.members}")
        if len(self.nodes) != len(self.members):
            raise ValueError(f"generation {self.number} has {len(self.members)} members but {len(self.nodes)} nodes")

    @property
    def num_nodes(self) -> int:
        return max(1, len(set(self.nodes)))

    def rank_of(self, replica_id: str) -> int | None:
        """Return the replica's rank in this generation, or None if it leaves."""
        return self.members.index(replica_id) if replica_id in self.members else None


class Decision(enum.Enum):
    STAY = "stay"
    COMMIT = "commit"
    ABANDON = "abandon"


def decide_switch(
    *, count: float, total: float, squares: float, world_size: int, pending: PublishedGeneration | None, epoch: int
) -> Decision:
    """Decide at a step boundary in ``epoch``, given the summed slots and this rank's prepared generation.

    A generation with joiners can only be entered in the epoch they wait in; once it has passed the attempt is
    abandoned, also by ranks whose own preparation is not complete, so that no rank commits what another gave up.
    """
    if pending is not None and pending.join_epoch is not None and epoch > pending.join_epoch:
        return Decision.ABANDON
    agreed = all_vote_alike(count, total, squares, world_size)
    if not agreed or pending is None or total != world_size * pending.number:
        return Decision.STAY
    if pending.join_epoch is not None and epoch < pending.join_epoch:
        return Decision.STAY
    return Decision.COMMIT
