"""Position in a stream that is read in parts: how far each part has come, and which replica reads it.

A stream whose data loader has several workers is one that can be divided: every worker reads a part of its own, which
it finds by ``torch.utils.data.get_worker_info()``. Here the parts of a pass are as many as all replicas have workers
when it begins, and stay what they are until it ends, however many replicas there are by then. All replicas know the
position of each part, so that any of them can go on with any part. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dist_core.errors import InvalidTraining


class PartedCursor:
    """Position within the current pass over a stream in parts."""

    def __init__(self) -> None:
        self.passes = 0
        self.position = 0
        self.left = False
        self.positions: list[int] = []
        """Samples of each part that count; no parts before the pass is divided."""
        self.ended: list[bool] = []
        self.owners: list[int] = []
        """The rank that reads each part."""
        self.world_size = 0
        """World size that the parts are divided for."""
        self.first_world_size = 0
        """World size when the pass began."""

    @property
    def num_parts(self) -> int:
        return len(self.positions)

    @property
    def is_over(self) -> bool:
        return all(self.ended)

    def begin_loop(self) -> None:
        if self.left and self.position:
            self.end_pass()
        self.left = False

    def divide(self, world_size: int, workers: int) -> None:
        """Give the parts to so many replicas; nothing changes when they are divided among as many.

        A pass that begins has ``workers`` parts for each.
        """
        if not self.positions:
            count = workers * world_size
            self.positions, self.ended = [0] * count, [False] * count
            self.first_world_size = world_size
        elif self.world_size == world_size:
            return
        self.world_size = world_size
        self.owners = [0] * self.num_parts
        for index, part in enumerate(self._read_on()):
            self.owners[part] = index % world_size

    def parts_of(self, rank: int) -> list[int]:
        """Return the parts that are left to read for a replica."""
        return [part for part in self._read_on() if self.owners[part] == rank]

    def advance(self, counts: Sequence[int], ended: Sequence[bool]) -> None:
        """Advance by the samples that a step took of each part, and end the parts that it found to end."""
        for part, count in enumerate(counts):
            self.positions[part] += count
            self.ended[part] |= bool(ended[part])
        self.position += sum(counts)
        self._share_out()

    def _share_out(self) -> None:
        """Give a replica at the end of its parts one from those that have the most left."""
        while True:
            left = [len(self.parts_of(rank)) for rank in range(self.world_size)]
            if min(left) > 0 or max(left) < 2:
                return
            part = self.parts_of(left.index(max(left)))[-1]
            self.owners[part] = left.index(0)

    def _read_on(self) -> list[int]:
        return [part for part, ended in enumerate(self.ended) if not ended]

    def end_pass(self) -> None:
        """End this pass without what is left of it; the next one is divided anew."""
        self.passes += 1
        self.position = self.world_size = self.first_world_size = 0
        self.left = False
        self.positions, self.ended, self.owners = [], [], []

    def state_dict(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "position": self.position,
            "left": self.left,
            "positions": list(self.positions),
            "ended": list(self.ended),
            "owners": list(self.owners),
            "world_size": self.world_size,
            "first_world_size": self.first_world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "positions" not in state:
            raise InvalidTraining(
                "the trial has read the stream as a whole, but num_workers is 2 or more here, so that each data "
                "worker would read a part of it; use num_workers=1 on all replicas"
            )
        self.passes, self.position, self.left = state["passes"], state["position"], bool(state["left"])
        self.positions, self.ended = list(state["positions"]), list(state["ended"])
        self.owners, self.world_size = list(state["owners"]), state["world_size"]
        self.first_world_size = state["first_world_size"]
