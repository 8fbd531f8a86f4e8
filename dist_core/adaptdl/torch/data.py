"""``adaptdl.torch.data``: the loader, and the sampler that scripts use on their own."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from dist_core.adaptdl.env import num_replicas, replica_rank
from dist_core.training.loader import AdaptiveDataLoader, current_dataloader

__all__ = ["AdaptiveDataLoader", "ElasticSampler", "current_dataloader"]


class ElasticSampler(Sampler[int]):
    """This replica's part of what is left of a pass from ``index`` on; all parts are equally long.

    Where the rest does not divide by the replicas, the pass begins anew for the last ones.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.num_replicas, self.rank = num_replicas(), replica_rank()
        self.epoch = self.index = 0

    def set_epoch(self, epoch: int, index: int = 0) -> None:
        """Set the pass, and how many of its samples all replicas together have had."""
        self.epoch, self.index = epoch, index

    def __len__(self) -> int:
        left = len(self.dataset) - self.index % len(self.dataset)
        return -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        order = np.arange(size)
        if self.shuffle:
            # A pass in which several times as many samples were drawn as there are is another one.
            order = np.random.Generator(np.random.Philox(key=[self.epoch, self.index // size])).permutation(size)
        first = self.index % size + self.rank
        positions = range(first, first + len(self) * self.num_replicas, self.num_replicas)
        return iter([int(order[position % size]) for position in positions])
