"""GradientViews: gradients that a loop has moved out of DDP's buckets are put back into them.

A weight's gradient is a view of its bucket, which the replicas sum. ``p.grad.data = ...`` has that very view lie
somewhere else, and DDP goes on writing gradients there: from the next step on the replicas would sum what the bucket
held before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class _Place:
    weight: nn.Parameter
    bucket: torch.Tensor
    """Kept, so that no other bucket comes to lie there."""
    address: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GradientViews:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[int, _Place] = {}
        """Each gradient's place, by the identity of its weight."""
        self._known: set[int] = set()
        """Addresses of the buckets."""

    def note(self, bucket: torch.Tensor) -> None:
        """Note whose gradients lie in a bucket that is about to be reduced, unless that is known."""
        if bucket.is_sparse or bucket.data_ptr() in self._known:
            return
        start = bucket.untyped_storage().data_ptr()
        self._known.add(bucket.data_ptr())
        for weight in self._module.parameters():
            gradient = weight.grad
            if gradient is None or gradient.is_sparse or not gradient._is_view() or gradient._base is None:
                continue
            if gradient.untyped_storage().data_ptr() == start:
                self._places[id(weight)] = _Place(
                    weight,
                    gradient._base,
                    gradient.data_ptr(),
                    gradient.size(),
                    gradient.stride(),
                    int(gradient.storage_offset()),
                )
        if self._places:
            # Buckets that are gone may come to lie where others did.
            self._known = {bucket.data_ptr(), *(place.bucket.data_ptr() for place in self._places.values())}

    def put_back(self) -> None:
        """Move gradients that lie elsewhere by now into their buckets, with what they hold."""
        for place in self._places.values():
            gradient = place.weight.grad
            if gradient is None or gradient.is_sparse or gradient.data_ptr() == place.address:
                continue
            # Another tensor in the gradient's place leaves the bucket's view alone.
            if gradient._is_view() and gradient._base is place.bucket:
                with torch.no_grad():
                    view = place.bucket.as_strided(place.size, place.stride, place.offset)
                    gradient.data = view.copy_(gradient)
