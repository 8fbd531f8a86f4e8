"""What the replicas of the fault tests run: a small training on data whose samples know their own number.

Each replica appends one line per optimizer step to ``$TRACE_DIR/<replica>.jsonl`` before it computes: generation, step
and the samples it is about to use. The end of the training writes the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import dist_core
from dist_core.core import get_core
from dist_core.errors import PeerLost, ReplicaExit
from dist_core.rerun import run_training

SAMPLES = 240
EPOCHS = 8


class Numbered(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x @ torch.arange(6.0) + 0.1 * torch.randn(SAMPLES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def train() -> list[float]:
    """Fixed batch of 24, SGD with momentum: ten steps an epoch; returns the final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = dist_core.AdaptiveDataLoader(Numbered(), batch_size=24, shuffle=True)
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer, schedule)
    core = get_core()
    who = core.environment.replica_id if core.environment is not None else "alone"
    pause = float(os.environ.get("STEP_SECONDS", "0"))
    trace = open(Path(os.environ["TRACE_DIR"]) / f"{who}.jsonl", "a", buffering=1)
    with trace:
        for epoch in dist_core.remaining_epochs_until(EPOCHS):
            for numbers, x, y in loader:
                if core.joined:
                    line = {
                        "generation": core.generation,
                        "step": core.steps,
                        "epoch": epoch,
                        "samples": numbers.tolist(),
                        "pid": os.getpid(),
                        "world_size": core.group.world_size,
                    }
                    trace.write(json.dumps(line) + "\n")
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x).squeeze(1), y).backward()
                if os.environ.get("RAISE_AT_STEP") == str(core.steps) and core.group.rank == core.group.world_size - 1:
                    raise RuntimeError("on purpose, on the last rank")
                optimizer.step()
                time.sleep(pause)
            schedule.step()
            dist_core.report(float(epoch), epoch)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def main() -> int:
    core = get_core()
    try:
        weights = run_training(core, train)
        if core.environment is None:
            (Path(os.environ["TRACE_DIR"]) / "weights.json").write_text(json.dumps(weights))
        elif core.group.rank == 0:
            assert core.channel is not None
            core.channel.request("POST", "/outcome", {"kind": "value", "value": weights})
        return 0
    except ReplicaExit as leaving:
        return int(leaving.code or 0)
    except PeerLost:
        return 75
    except RuntimeError as error:
        assert core.channel is not None
        core.channel.request("POST", "/outcome", {"kind": "error", "error_type": "RuntimeError", "message": str(error)})
        return 1
    finally:
        core.close()


if __name__ == "__main__":
    sys.exit(main())
