"""FrozenWeights: weights that need no gradient, which every replica builds for itself from the same code.

Fine-tuning with adapters (LoRA, Hu et al., ICLR'22) leaves all but a few weights as they were loaded. Where that is
said, neither checkpoints nor hand-overs carry them; a sum over their bits tells replicas whose code builds others.
"""

from __future__ import annotations

from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.torch_private import times_written


class FrozenWeights:
    """Of a model as it is when it is wrapped. What is trained or written to later is none any more."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        named = module.named_parameters(remove_duplicate=False)
        frozen = {name: each for name, each in named if not each.requires_grad}
        self._built = {name: (each.data_ptr(), times_written(each)) for name, each in frozen.items()}
        self._sums = {name: _sum_of_bits(each) for name, each in frozen.items()}

    def names(self) -> set[str]:
        """Of those that are still as they were built."""
        present = dict(self._module.named_parameters(remove_duplicate=False))
        return {
            name
            for name, built in self._built.items()
            if not present[name].requires_grad and (present[name].data_ptr(), times_written(present[name])) == built
        }

    def without(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """A module's state dictionary without them, and the sums of those that are left out."""
        names = self.names()
        kept = {name: value for name, value in state.items() if name not in names}
        return kept, {name: self._sums[name] for name in sorted(names)}

    def check(self, theirs: dict[str, int]) -> None:
        """Raises InvalidTraining where the trial's were others than this replica's code builds."""
        for name, expected in theirs.items():
            if self._sums.get(name) != expected:
                raise InvalidTraining(
                    f"the weights {name!r} are frozen, are no part of the trial's state (frozen='rebuild'), and are "
                    "others here than where the trial began; load them from the same file on every replica, or leave "
                    "out frozen='rebuild'"
                )


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The same for the same numbers, wherever they lie; another one for nearly all others."""
    words = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = words.numel() // 4 * 4
    total = int(words[:whole].view(torch.int32).sum(dtype=torch.int64)) if whole else 0
    return total + int(words[whole:].sum(dtype=torch.int64))
