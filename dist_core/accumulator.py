"""Accumulator: sums over all replicas of what each adds up on its own, as in evaluation loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dist_core.core import get_core
from dist_core.errors import InvalidTraining, PeerLost


class Accumulator(dict[str, float]):
    """Add numbers under string keys; inside ``synchronized()`` the keys hold the sums over all replicas.

    totals = Accumulator()
    totals["correct"] += 3
    with totals.synchronized():
        print(totals["correct"])
    """

    def __missing__(self, key: str) -> float:
        return 0.0

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Collective: sum over the replicas for the duration of the block, then continue adding to the local values."""
        for key, value in self.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise InvalidTraining(f"Accumulator[{key!r}] is {value!r}; only numbers can be summed over replicas")
        local = dict(self)
        group = get_core().group
        if group.world_size > 1:
            keys = sorted({key for keys in group.gather_json(sorted(self)) for key in keys})
            values = torch.tensor([float(self.get(key, 0.0)) for key in keys], dtype=torch.float64)
            try:
                work = group.sum_later(values)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise PeerLost(f"a replica vanished while {keys} were summed: {error}") from error
            self.update(dict(zip(keys, values.tolist(), strict=True)))
        try:
            yield self
        finally:
            self.clear()
            self.update(local)
