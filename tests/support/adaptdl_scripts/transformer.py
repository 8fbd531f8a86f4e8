"""A language model trained the way AdaptDL's transformer example does: text in windows, gradients clipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn, optim

import dist_core.adaptdl.torch as adl
from dist_core.adaptdl.torch.iterator import AdaptiveBPTTIterator

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def corpus(count: int) -> Any:
    """What torchtext's legacy data sets look like: one example, a field with a vocabulary."""
    text = [WORDS[(index * index) % len(WORDS)] for index in range(count)]
    field = SimpleNamespace(vocab=SimpleNamespace(stoi={word: index for index, word in enumerate(WORDS)}))
    return SimpleNamespace(examples=[SimpleNamespace(text=text)], fields={"text": field})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(16, len(WORDS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(text))
        result: torch.Tensor = self.out(self.encoder(self.embed(text), mask=mask))
        return result


def run(model: Any, iterator: Any, optimizer: Any, parameters: Any) -> float:
    stats = adl.Accumulator()
    for batch in iterator:
        if optimizer is not None:
            optimizer.zero_grad()
        output = model(batch.text)
        loss = nn.functional.cross_entropy(output.view(-1, len(WORDS)), batch.target.view(-1))
        if optimizer is not None:
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        stats["loss_sum"] += loss.item() * batch.target.size(1)
        stats["total"] += batch.target.size(1)
    with stats.synchronized():
        average: float = stats["loss_sum"] / stats["total"]
        stats["loss_avg"] = average
    return average


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    adl.init_process_group("gloo")
    model = Model()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    wrapped = adl.AdaptiveDataParallel(model, optimizer, scheduler)
    train_iter = AdaptiveBPTTIterator(corpus(3000), 8, 10, max_batch_size=64, local_bsz_bounds=(4, 32))
    val_iter = AdaptiveBPTTIterator(corpus(600), batch_size=8, bptt_len=10)
    first = last = 0.0
    for epoch in adl.remaining_epochs_until(3):
        wrapped.train()
        run(wrapped, train_iter, optimizer, wrapped.parameters())
        wrapped.eval()
        with torch.no_grad():
            last = run(wrapped, val_iter, None, None)
        first = last if epoch == 0 else first
        scheduler.step()
    return first, last
