"""Time to 97% test accuracy on the digits data: an adaptive batch size against five fixed ones, two replicas each.

All start from the same weights and from the learning rate that is best for the smallest batch (a third more diverges);
larger fixed batches scale it by the square root of their size, the better of the usual rules here. Accuracy is looked
at after every few hundred examples, which the clock does not count. A run that never gets there counts as long as it
took.
"""

from __future__ import annotations

import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.frame import Measurement
from benchmarks.ranks import run_ranks

INIT_BATCH = 16
FIXED = (16, 32, 64, 128, 256)
ADAPTIVE = 0
SEEDS = 5
GOAL = 0.97
LOOK_EVERY = 256
MOST_EPOCHS = 60
BASE_RATE = 0.06


def data(seed: int) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def train(batch: int, seed: int) -> tuple[float, bool, list[int]]:
    """Seconds to the goal, whether it was reached, and the batch sizes on the way."""
    from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
    from dist_core.trial.current import reset_core

    reset_core()
    torch.manual_seed(seed)
    dataset, x_test, y_test = data(seed)
    model = network()
    rate = BASE_RATE if batch == ADAPTIVE else BASE_RATE * (batch / INIT_BATCH) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loader = AdaptiveDataLoader(dataset, batch_size=batch or INIT_BATCH, shuffle=True, seed=seed)
    if batch == ADAPTIVE:
        loader.autoscale_batch_size(max(FIXED), local_bsz_bounds=(4, 128))
    wrapped = AdaptiveDataParallel(model, optimizer)
    sizes: list[int] = []
    seconds, examples, looked_at = 0.0, 0, 0
    for _ in remaining_epochs_until(MOST_EPOCHS):
        began = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            # The same count on both replicas, whose parts of a batch may differ by one.
            examples += loader.current_batch_size if wrapped.stepped else 0
            if wrapped.stepped and examples - looked_at >= LOOK_EVERY:
                looked_at = examples
                seconds += time.perf_counter() - began
                sizes.append(loader.current_batch_size)
                with torch.no_grad():
                    accuracy = float((model(x_test).argmax(dim=1) == y_test).float().mean())
                if accuracy >= GOAL:
                    return seconds, True, sizes
                began = time.perf_counter()
        seconds += time.perf_counter() - began
    return seconds, False, sizes


def _runs(rank: int, world_size: int) -> dict[str, list[tuple[float, bool, list[int]]]]:
    train(INIT_BATCH, 99)
    return {str(batch): [train(batch, seed) for seed in range(SEEDS)] for batch in (ADAPTIVE, *FIXED)}


def measure() -> list[Measurement]:
    found = run_ranks(_runs, 2)
    medians = {int(batch): statistics.median(seconds for seconds, _, _ in runs) for batch, runs in found.items()}
    ours = medians.pop(ADAPTIVE)
    best = min(medians, key=medians.__getitem__)
    details = {"medians_s": medians, "reached": {b: sum(r[1] for r in runs) for b, runs in found.items()}}
    return [
        Measurement(
            what="digits to 97%, adaptive",
            ours=ours,
            peer=medians[best],
            unit="s",
            peer_name=f"the best fixed batch, {best}",
            target=1.0,
            details={**details, "batch_sizes": [run[2] for run in found[str(ADAPTIVE)]]},
        ),
        Measurement(
            what="digits to 97%, adaptive",
            ours=ours,
            peer=statistics.median(medians.values()),
            unit="s",
            peer_name="the median fixed batch",
            target=0.5,
        ),
    ]
