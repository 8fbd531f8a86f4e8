"""What replicas of several processes run in tests: a small training of a sharded model, or of a pipeline.

``HOW`` says which; what each step was made of is traced as in ``training_code``. The value of the trial is its outputs
for the first samples.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import dist_core
from dist_core.errors import PeerLost, ReplicaExit
from dist_core.larger.model import ElasticModel
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import run_training
from tests.support.training_code import EPOCHS, Numbered
from tests.support.unhurried import rest_of_step


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.last(x).squeeze(1)
        return found


def train() -> list[float]:
    """Fixed batch of 24, ten steps an epoch; in double precision, because Adam enlarges what is next to nothing."""
    model, how = Stack().double(), os.environ.get("HOW", "sharded")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = dist_core.AdaptiveDataLoader(Numbered(), batch_size=24, shuffle=True)
    wrapped: ElasticPipeline | ElasticFullyShard | ElasticModel
    if how == "chosen":
        wrapped = ElasticModel(model, optimizer, nn.functional.mse_loss, schedule, example=torch.zeros(2, 6).double())
    elif how == "pipeline":
        wrapped = ElasticPipeline(
            model, optimizer, nn.functional.mse_loss, schedule, example=torch.zeros(2, 6).double()
        )
    else:
        wrapped = ElasticFullyShard(model, optimizer, schedule)
    core = get_core()
    who = core.environment.replica_id if core.environment is not None else "alone"
    with open(Path(os.environ["TRACE_DIR"]) / f"{who}.jsonl", "a", buffering=1) as trace:
        for epoch in dist_core.remaining_epochs_until(EPOCHS):
            for numbers, x, y in loader:
                optimizer.zero_grad()
                if core.joined:
                    line = {
                        "generation": core.generation.number,
                        "step": core.position.steps,
                        "epoch": epoch,
                        # Stages of one pipeline see the same ones.
                        "samples": numbers.tolist() if core.adds_up else [],
                        "pid": os.getpid(),
                        "world_size": core.generation.group.world_size,
                        "loss": 0.0,
                        "state": None,
                    }
                    trace.write(json.dumps(line) + "\n")
                if not isinstance(wrapped, ElasticFullyShard):
                    wrapped.step(x.double(), y.double())
                else:
                    nn.functional.mse_loss(wrapped(x.double()), y.double()).backward()
                optimizer.step()
                rest_of_step()
            schedule.step()
            wrapped.eval()
            sums = dist_core.Accumulator()
            with torch.no_grad():
                for _, x, y in dist_core.AdaptiveDataLoader(Numbered(), batch_size=24):
                    sums["squares"] += float((wrapped(x.double()) - y).square().sum())
                    sums["count"] += len(y)
            wrapped.train()
            with sums.synchronized():
                dist_core.report(sums["squares"] / sums["count"], epoch)
                assert sums["count"] == len(Numbered())
    wrapped.eval()
    with torch.no_grad():
        found: list[float] = wrapped(Numbered().x[:8].double()).tolist()
    return found


def main() -> int:
    core = get_core()
    try:
        outputs = run_training(core, train)
        if core.environment is None:
            (Path(os.environ["TRACE_DIR"]) / "outputs.json").write_text(json.dumps(outputs))
        elif core.generation.group.rank == 0:
            assert core.channel is not None
            core.channel.request("POST", "/outcome", {"kind": "value", "value": outputs})
        return 0
    except ReplicaExit as leaving:
        return leaving.status
    except PeerLost as error:
        print(error, file=sys.stderr)
        return 75
    except Exception:
        if core.broken is not None:
            return 75
        raise
    finally:
        core.close()


if __name__ == "__main__":
    sys.exit(main())
