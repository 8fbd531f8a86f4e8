"""Training that the replicas of the rescale benchmark run: ten million parameters with AdamW, 120 MB of state."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dist_core
from benchmarks.step_overhead import mlp
from dist_core.errors import PeerLost, ReplicaExit
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import run_training

SAMPLES = 64 * 400


class Adapted(nn.Module):
    """An adapter beside a frozen base of so many megabytes, which nothing is computed with."""

    def __init__(self, megabytes: int, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(megabytes * 250_000), requires_grad=False)
        self.adapter = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.Linear(8, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.adapter(x)
        return found


def train() -> None:
    torch.manual_seed(0)
    model, shape, batch, classes = mlp()
    adapted = os.environ.get("ADAPTED")
    frozen: Literal["keep", "rebuild"] = "rebuild" if os.environ.get("FROZEN") == "rebuild" else "keep"
    if adapted is not None:
        model = Adapted(int(adapted), shape, classes)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)
    data = TensorDataset(torch.randn(512, *shape).repeat(SAMPLES // 512, 1), torch.randint(classes, (SAMPLES,)))
    loader = dist_core.AdaptiveDataLoader(data, batch_size=batch)
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer, noise_every=10, frozen=frozen)
    with noting() as note:
        for _ in dist_core.remaining_epochs_until(1000):
            for x, y in loader:
                began = time.time()
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                if adapted is not None:
                    time.sleep(0.005)
                note(began)


@contextmanager
def noting() -> Iterator[Callable[..., None]]:
    """Yield a function to call after each step, with the time at which that began where it is known."""
    core = get_core()
    assert core.environment is not None
    with open(Path(os.environ["TRACE_DIR"]) / f"{core.environment.replica_id}.jsonl", "a", buffering=1) as trace:

        def note(began: float | None = None) -> None:
            if not core.joined:
                return
            row = {
                "began": began,
                "at": time.time(),
                "step": core.position.steps,
                "generation": core.generation.number,
                "world_size": core.generation.group.world_size,
                "rank": core.generation.group.rank,
                "pauses": list(core.news.pauses),
            }
            trace.write(json.dumps(row) + "\n")

        yield note


def main() -> int:
    return run(train)


def run(code: Callable[[], None]) -> int:
    core = get_core()
    try:
        run_training(core, code)
    except ReplicaExit as leaving:
        return leaving.status
    except PeerLost:
        return 75
    finally:
        core.close()
    return 0
