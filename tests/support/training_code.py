"""What the replicas of the fault tests run: a small training on data whose samples know their own number.

Each replica appends one line per optimizer step to ``$TRACE_DIR/<replica>.jsonl`` before the optimizer steps:
generation, step, the samples it uses, the sum of their losses and, at the first step of a generation, a digest of all
state that replicas share. The end of the training writes the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import dist_core
import dist_core.generations.switch
import dist_core.state.checkpoint
import dist_core.trial.entering
from dist_core.generations.state_transfer import share_state
from dist_core.state.packing import pack
from dist_core.trial.current import get_core
from dist_core.trial.replica import Replica
from tests.support.replica_main import run_as_replica
from tests.support.unhurried import rest_of_step

SAMPLES = 240
EPOCHS = int(os.environ.get("EPOCHS", "8"))


class Average:
    """A copy of the weights that follows them slowly: a state of the user's own."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.weights, state["weights"], strict=True):
            mine.copy_(theirs)


def shared_state() -> str:
    """Digest of what is the same on all replicas when a generation begins: not times, nor random streams."""
    own = ("adaptation", "checkpoints", "random")
    content = {name: value for name, value in get_core().registry.capture().items() if name not in own}
    tensors: list[torch.Tensor] = []
    skeleton = pack(content, tensors)
    digest = hashlib.sha256(repr(skeleton).encode())
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class Heavy(nn.Module):
    """A model beside weights that change nothing, and whose gradients take a while to travel."""

    def __init__(self, model: nn.Module, floats: int) -> None:
        super().__init__()
        self.model = model
        self.ballast = nn.Parameter(torch.zeros(floats))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x) + 0.0 * self.ballast.sum()
        return result


class Numbered(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x @ torch.arange(6.0) + 0.1 * torch.randn(SAMPLES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def prepare_to_die(core: Replica, model: nn.Sequential, ballast: nn.Parameter | None) -> None:
    """``DIE_IN`` names a place, ``DIE_RANK`` who ends there, once in the whole trial, from ``DIE_STEP`` on."""
    place = os.environ.get("DIE_IN")
    rank = int(os.environ.get("DIE_RANK", "0"))
    step = int(os.environ.get("DIE_STEP", "15"))

    def die(after_seconds: float = 0.0) -> None:
        if core.joined and core.generation.group.rank == rank and core.position.steps >= step:
            try:
                os.close(os.open(Path(os.environ["TRACE_DIR"]) / "died", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            time.sleep(after_seconds)
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            die()
            return function(*args, **options)

        return call

    if place == "forward":
        model[0].register_forward_hook(lambda *_: die())
    elif place == "all-reduce":
        # The last gradient: the others come to the reduction meanwhile and wait in it.
        first = model[0]
        assert isinstance(first, nn.Linear)
        first.weight.register_hook(lambda _: die(after_seconds=0.2))
    elif place == "message":
        # Within the transfer of one bucket, from another thread: the pass itself goes on.
        assert ballast is not None
        delay = float(os.environ["DIE_AFTER"])
        ballast.register_hook(lambda _: threading.Timer(delay, die).start())
    elif place == "checkpoint":
        dist_core.state.checkpoint.os.fsync = dying(os.fsync)  # type: ignore[attr-defined]
    elif place == "rescale":
        for module in (dist_core.trial.entering, dist_core.generations.switch):
            module.share_state = dying(share_state)  # type: ignore[attr-defined]  # where they look it up


def train() -> list[float]:
    """Fixed batch of 24, SGD with momentum: ten steps an epoch; returns the final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    heavy = Heavy(model, int(os.environ["BALLAST"])) if "BALLAST" in os.environ else None
    optimizer = torch.optim.SGD((heavy or model).parameters(), lr=0.05, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = dist_core.AdaptiveDataLoader(Numbered(), batch_size=24, shuffle=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wrapped = dist_core.AdaptiveDataParallel(heavy or model, optimizer, schedule, scaler)
    average = Average(model)
    dist_core.register_state("average", average)
    # The optimizer tells when a step was applied: not in earlier micro-batches, nor when a replica was lost in it.
    optimizer.register_step_post_hook(lambda *_: average.update(model))
    core = get_core()
    membership = core.membership
    if membership is not None:
        signal.signal(signal.SIGTERM, lambda *_: membership.told_to_end())
    who = core.environment.replica_id if core.environment is not None else "alone"
    prepare_to_die(core, model, None if heavy is None else heavy.ballast)
    generation = 0
    trace = open(Path(os.environ["TRACE_DIR"]) / f"{who}.jsonl", "a", buffering=1)
    with trace:
        for epoch in dist_core.remaining_epochs_until(EPOCHS):
            for numbers, x, y in loader:
                optimizer.zero_grad()
                losses = nn.functional.mse_loss(wrapped(x).squeeze(1), y, reduction="none")
                if core.joined:
                    line = {
                        "generation": core.generation.number,
                        "step": core.position.steps,
                        "epoch": epoch,
                        "samples": numbers.tolist(),
                        "pid": os.getpid(),
                        "world_size": core.generation.group.world_size,
                        "loss": float(losses.detach().double().sum()),
                        "state": shared_state() if core.generation.number != generation else None,
                    }
                    generation = core.generation.number
                    trace.write(json.dumps(line) + "\n")
                scaler.scale(losses.mean()).backward()
                group = core.generation.group
                if os.environ.get("RAISE_AT_SIZE") == str(group.world_size) and group.rank == group.world_size - 1:
                    raise RuntimeError("on purpose, on the last rank")
                scaler.step(optimizer)
                scaler.update()
                if core.joined:
                    # A joiner's own passes, which nobody waits with, take as long as they take.
                    rest_of_step()
            schedule.step()
            dist_core.report(float(epoch), epoch)
    return [float(value) for weights in (*model.parameters(), *average.weights) for value in weights.detach().flatten()]


def main() -> int:
    return run_as_replica(train, told=RuntimeError, alone="weights.json")


if __name__ == "__main__":
    sys.exit(main())
