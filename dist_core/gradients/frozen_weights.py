"""FrozenWeights: weights that need no gradient, which every replica builds for itself from the same code.

Fine-tuning with adapters (LoRA, Hu et al., ICLR'22) leaves all but a few weights as they were loaded. Where that is
said, neither checkpoints nor hand-overs carry them; a sum over their bits tells replicas whose code builds others.
"""

from __future__ import annotations

from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.torch_private import times_written

SAMPLED = 1024
"""Bytes of each weight that tell whether it was written to behind torch's back."""
ROW = 1 << 16
ROWS_AT_ONCE = 32


class FrozenWeights:
    """Weights that are still as they were when their model was wrapped: neither trained nor written to since.

    Writes are counted by torch, but for those through ``.data`` (averaged teachers, pruning): of these, a sample of
    each weight tells, and the writing of a few single numbers can escape it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        frozen = {name: each for name, each in self._present().items() if not each.requires_grad}
        # Of tensors made in inference mode torch counts no writes.
        frozen = {name: each for name, each in frozen.items() if not each.is_inference()}
        self._built = {name: _as_it_is(each) for name, each in frozen.items()}
        self._sums = {name: sum_of_bits(each) for name, each in frozen.items()}

    def names(self) -> set[str]:
        """Return the names of weights that are still as they were built."""
        present = self._present()
        return {
            name
            for name, built in self._built.items()
            if name in present and not present[name].requires_grad and _as_it_is(present[name]) == built
        }

    def without(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the state dictionary without the frozen weights, and a checksum of each one that was left out."""
        names = self.names()
        kept = {name: value for name, value in state.items() if name not in names}
        return kept, {name: self._sums[name] for name in sorted(names)}

    def check(self, theirs: dict[str, int]) -> None:
        """Raise InvalidTraining if the trial's frozen weights differ from those that this replica's code builds."""
        names, present = self.names(), self._present()
        for name, expected in theirs.items():
            if name in names:
                own: int | None = self._sums[name]
            else:
                own = sum_of_bits(present[name]) if name in present else None
            if own != expected:
                raise InvalidTraining(
                    f"the frozen weights {name!r} differ from those that the trial began with, and frozen='rebuild' "
                    "keeps them out of the trial's state; load them from the same file on every replica, or leave "
                    "out frozen='rebuild'"
                )

    def _present(self) -> dict[str, torch.nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))


def _as_it_is(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's address, its count of writes, and a sum over some of its numbers."""
    present = tensor.detach()
    if present.is_contiguous():
        present = present.view(-1)[:: max(1, present.nbytes // SAMPLED)]
    return tensor.data_ptr(), times_written(tensor), sum_of_bits(present)


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return a checksum of the numbers in their order, the same on any device."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    # Odd, so that no bit is lost where the product runs over; without a pattern, so that order counts.
    places = torch.arange(1, min(ROW, words.numel()) + 1, device=words.device) * -7046029254386353131
    places = (places ^ (places >> 29)) | 1
    total = 0
    for piece in torch.split(words, ROW * ROWS_AT_ONCE):
        # Signs are uppermost, where two of them would cancel out.
        some = piece ^ (piece >> 32)
        full = some.numel() // ROW * ROW
        if full:
            for each in (some[:full].view(-1, ROW) * places).sum(dim=1).tolist():
                total = _next(total, each)
        rest = some[full:]
        total = _next(total, int((rest * places[: rest.numel()]).sum()))
    return _next(total, int.from_bytes(bytes(octets[whole:].tolist()), "little"))


def _next(total: int, value: int) -> int:
    return (total * 6364136223846793005 + value + 2**63) % 2**64 - 2**63
