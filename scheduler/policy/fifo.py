"""First come, first served, each trial on as many slots as its minimum says: what most clusters do."""

from __future__ import annotations

from typing import Final

from scheduler.allocation.fixed_size import serve_in_order
from scheduler.allocation.grants import grants_for
from scheduler.snapshot import Grant, Snapshot


class FifoPolicy:
    name: Final = "fifo"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        order = snapshot.eligible
        placed = serve_in_order(snapshot, order, skip=False)
        return grants_for(snapshot, placed, code="first_come", why="first come, first served")
