"""A training script alone: no tuner, no scheduler. Killed at any moment, it goes on from where it was.

    ELASTUNE_CHECKPOINT_DIR=checkpoints python examples/without_a_tuner.py
    ELASTUNE_CHECKPOINT_DIR=checkpoints torchrun --nproc-per-node 2 examples/without_a_tuner.py

The second line goes on with what the first one left, on another number of processes.
"""

from __future__ import annotations

import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until, set_checkpoint_interval

KILLED_BEHIND = int(os.environ.get("KILLED_BEHIND", "0"))
"""Epochs after which the script kills itself, for those who want to see that."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    set_checkpoint_interval(0.05)
    digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    digits = digits.float() / 16
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=60, shuffle=True)
    model = AdaptiveDataParallel(net, optimizer)
    for epoch in remaining_epochs_until(20):
        print(f"epoch {epoch}", flush=True)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch + 1 == KILLED_BEHIND:
            os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
    print(f"best: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
