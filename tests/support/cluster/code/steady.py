"""What trials of these tests train: a small model that takes its time, and says how long it ever stood still."""

from __future__ import annotations

import json
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ElasticFullyShard,
    ElasticModel,
    remaining_epochs_until,
    report,
)

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))
EPOCHS = int(os.environ.get("EPOCHS", "400"))


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(data, batch_size=16, shuffle=True)
    loader.autoscale_batch_size(64, local_bsz_bounds=(4, 16))
    wrapped: nn.Module
    if os.environ.get("HOW") == "sharded":
        wrapped = ElasticFullyShard(model, optimizer)
    elif os.environ.get("HOW") == "chosen":
        # Room for a half of it and more, but not for all.
        os.environ["ELASTUNE_SLOT_MEMORY"] = "440e3"
        large = nn.Sequential(nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(large.parameters(), lr=1e-3)
        wrapped = ElasticModel(large, optimizer, nn.functional.mse_loss, example=torch.zeros(1, 8), layouts=["sharded"])
    else:
        wrapped = AdaptiveDataParallel(model, optimizer)
    longest, last = 0.0, None
    for epoch in remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            now = time.monotonic()
            longest = max(longest, 0.0 if last is None else now - last)
            last = now
        report(float(loss), epoch)
        print(json.dumps({"epoch": epoch, "longest": round(longest, 3), "pid": os.getpid()}), flush=True)
        longest = 0.0


if __name__ == "__main__":
    main()
