"""Costs of large batches for adapters (LoRA) and for the whole model: why adapters' stay fixed by default.

A tiny Llama learns that each word is followed by the next one, and then, as adapters or as a whole, that it is followed
by the one after: the same number of samples in batches of 8, 32 and 128, each at the best of five learning rates, with
the mean of three seeds. The figure is the loss on sentences that were not trained on, over that of batches of 8.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from typing import Any

import torch

from benchmarks.frame import Measurement
from examples.lora import WORDS, base_model

BATCHES = (8, 32, 128)
RATES = {"adapters": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "whole model": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
SAMPLES, EPOCHS, LENGTH = 1024, 3, 12
SEEDS = 3


def sentences(count: int, stride: int, seed: int) -> torch.Tensor:
    """Return sentences in which each word is followed by the one ``stride`` later, with a slip here and there."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [chance.randrange(WORDS)]
        while len(words) < LENGTH:
            words.append((words[-1] + stride + (chance.random() < 0.1)) % WORDS)
        rows.append([4 + word for word in words])
    return torch.tensor(rows)


def train(model: Any, data: torch.Tensor, batch: int, rate: float, epochs: int, seed: int) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    steps = epochs * math.ceil(len(data) / batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in data[torch.randperm(len(data), generator=generator)].split(batch):
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            schedule.step()


def tuned(base: Any, kind: str, batch: int, rate: float, seed: int) -> float:
    """Loss on the new task."""
    import peft

    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    if kind == "adapters":
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    train(model, sentences(SAMPLES, 2, seed), batch, rate, EPOCHS, seed)
    held_out = sentences(256, 2, 1000)
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


def measure() -> list[Measurement]:
    base = base_model()
    train(base, sentences(4096, 1, 500), 32, 3e-3, 4, 0)
    found: dict[str, dict[int, float]] = {}
    for kind, rates in RATES.items():
        for batch in BATCHES:
            of_rates = [
                statistics.mean(tuned(base, kind, batch, rate, seed) for seed in range(SEEDS)) for rate in rates
            ]
            found.setdefault(kind, {})[batch] = min(of_rates)
    return [
        Measurement(
            what=f"loss of adapters in batches of {batch}, over that in batches of {BATCHES[0]}",
            ours=found["adapters"][batch] / found["adapters"][BATCHES[0]],
            peer=found["whole model"][batch] / found["whole model"][BATCHES[0]],
            unit="times",
            peer_name="the whole model's",
            details={
                "losses": {kind: {str(size): loss for size, loss in each.items()} for kind, each in found.items()}
            },
        )
        for batch in BATCHES[1:]
    ]
