"""A fixed size for every trial, and those that promise most start or resume first: ASHA's order (Li et al., MLSys'20).

Which trials go on is the tuner's decision, as everywhere; this policy only never changes a trial's size.
"""

from __future__ import annotations

from typing import Final

from scheduler.allocation.fixed_size import serve_in_order
from scheduler.allocation.grants import grants_for
from scheduler.snapshot import Grant, Snapshot


class AshaStaticPolicy:
    name: Final = "asha_static"

    def allocate(self, snapshot: Snapshot) -> dict[str, Grant]:
        order = sorted(snapshot.eligible, key=lambda view: -view.promise)
        placed = serve_in_order(snapshot, order, skip=True)
        return grants_for(snapshot, placed, code="fixed_size", why="a fixed size, the most promising first")
