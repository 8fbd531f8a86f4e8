"""Training that the replicas of ``larger_models`` run: a sharded model with 120 MB of weights and optimizer state."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import dist_core
from dist_core.errors import PeerLost, ReplicaExit
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import run_training

WIDTH = 1580


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.utils.data.TensorDataset(torch.randn(240, WIDTH))
    loader = dist_core.AdaptiveDataLoader(data, batch_size=8)
    wrapped = ElasticFullyShard(model, optimizer)
    core = get_core()
    assert core.environment is not None
    pauses = 0
    with open(Path(os.environ["TRACE_DIR"]) / f"{core.environment.replica_id}.jsonl", "a", buffering=1) as trace:
        for epoch in dist_core.remaining_epochs_until(int(os.environ["EPOCHS"])):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                time.sleep(float(os.environ["STEP_SECONDS"]))
                if core.joined:
                    known = list(core.news.pauses)
                    line = {
                        "generation": core.generation.number,
                        "step": core.position.steps,
                        "epoch": epoch,
                        "samples": [],
                        "state": None,
                        "pauses": known[pauses:],
                        "at": time.monotonic(),
                        "slots": core.model_parallel.members,
                    }
                    pauses = len(known)
                    trace.write(json.dumps(line) + "\n")


def main() -> int:
    core = get_core()
    try:
        run_training(core, train)
        return 0
    except ReplicaExit as leaving:
        return leaving.status
    except PeerLost:
        return 75
    finally:
        core.close()
