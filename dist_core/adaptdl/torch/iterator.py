"""``adaptdl.torch.iterator``: language-model batches cut from one long text.

The text is cut into windows of ``bptt_len`` tokens, each with the window one token later as its target. A batch is so
many windows side by side, whatever the number of replicas, so batch sizes adapt and every token is seen once an epoch.
No hidden state is meant to be carried from batch to batch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

from dist_core.errors import InvalidTraining
from dist_core.training.loader import AdaptiveDataLoader


class TextWindows(Dataset[torch.Tensor]):
    """Windows of a long text, ``bptt_len + 1`` tokens each; the last one ends with the text."""

    def __init__(self, tokens: torch.Tensor, bptt_len: int) -> None:
        if bptt_len < 1 or len(tokens) < bptt_len + 1:
            raise InvalidTraining(
                f"the text has {len(tokens)} tokens and bptt_len is {bptt_len}; bptt_len must be at least 1, and "
                "the text must have at least bptt_len + 1 tokens"
            )
        self.tokens = tokens
        self.bptt_len = bptt_len

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.bptt_len)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = min(index * self.bptt_len, len(self.tokens) - 1 - self.bptt_len)
        return self.tokens[start : start + self.bptt_len + 1]


class AdaptiveBPTTIterator(AdaptiveDataLoader):
    """Batches with ``text`` and ``target`` of shape (bptt_len, batch).

    ``dataset`` is a torchtext language-modelling dataset (one example with a ``text``, and its field), or a sequence of
    token numbers. With both ``max_batch_size`` and ``local_bsz_bounds`` the batch size adapts.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        bptt_len: int,
        *,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int, int] | None = None,
        device: Any = None,
        **_: Any,
    ) -> None:
        self._device = device
        super().__init__(TextWindows(_numbers(dataset), bptt_len), batch_size=batch_size, collate_fn=self._side_by_side)
        if max_batch_size and local_bsz_bounds:
            self.autoscale_batch_size(max_batch_size, local_bsz_bounds)

    def _side_by_side(self, windows: list[torch.Tensor]) -> SimpleNamespace:
        together = torch.stack(windows, dim=1).to(self._device)
        return SimpleNamespace(text=together[:-1], target=together[1:], batch_size=len(windows))


def _numbers(dataset: Any) -> torch.Tensor:
    if hasattr(dataset, "fields") and hasattr(dataset, "examples"):
        text = dataset.examples[0].text
        vocabulary = dataset.fields["text"].vocab.stoi
        return torch.tensor([vocabulary[token] for token in text], dtype=torch.int64)
    return torch.as_tensor(dataset, dtype=torch.int64).flatten()
