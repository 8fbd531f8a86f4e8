"""Training scripts put together at random from what people do, run as they are in plain PyTorch and as a trial.

A program is data, so that it can be drawn, made smaller and printed; ``run`` is the script that it describes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.habits import BATCH, Kit, examples, weights_of

EPOCHS, WIDTH, LAYERS = 3, 6, 3
LARGE = 2.5575
"""The first of an epoch's four batches has a value above."""
mse = nn.functional.mse_loss

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}
SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: lr.StepLR(optimizer, 2, 0.7),
    "cosine": lambda optimizer: lr.CosineAnnealingLR(optimizer, 12),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.08, total_steps=40, cycle_momentum=False),
}


@dataclass(frozen=True, slots=True)
class Program:
    samples: int = 96
    drop_last: bool = False
    norm: bool = False
    optimizer: str = "sgd"
    two_optimizers: bool = False
    schedule: str = ""
    schedule_by_epoch: bool = False
    schedule_given: bool = True
    """To the wrapper, with the optimizers."""
    accumulate: int = 1
    """Batches an update, by the script's own counter."""
    clip: float = 0.0
    skip: str = ""
    """Where a batch with a large sample is left: "before" its forward pass, behind the "forward" or "backward" one."""
    penalty: bool = False
    """Add a penalty of the weights to the loss."""
    two_losses: bool = False
    """A backward pass for each."""
    closure: bool = False
    zero_behind: bool = False
    """Gradients are set to zero behind the update."""
    average: str = ""
    """Average of the weights: by "torch" (AveragedModel), or by "own" arithmetic behind each update."""
    freeze: tuple[int, int] | None = None
    """From that epoch on, that layer."""
    thaw: tuple[int, int] | None = None
    """A layer that is frozen from the start trains from that epoch on."""
    evaluates: bool = False
    stops_at: int = EPOCHS
    """The script leaves its loop behind that epoch."""
    keeps_best: bool = False
    """The weights of the best evaluation are the result."""

    def __repr__(self) -> str:
        plain = Program()
        told = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        )
        return f"Program({', '.join(told)})"

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // BATCH if self.drop_last else -(-self.samples // BATCH)

    @property
    def steps(self) -> int:
        """Return the steps that it trains."""
        return self.steps_per_epoch * min(EPOCHS, self.stops_at)

    def __call__(self, kit: Kit) -> list[float]:
        return run(self, kit)


def network(program: Program) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH) if program.norm else nn.Identity(), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def run(program: Program, kit: Kit) -> list[float]:
    model = network(program)
    layers = linear_layers(model)
    if program.thaw is not None:
        layers[program.thaw[1]].requires_grad_(False)
    trained = list(model.parameters())
    split = len(trained) - 2
    shares = [trained[:split], trained[split:]] if program.two_optimizers else [trained]
    optimizers = [OPTIMIZERS[program.optimizer](share) for share in shares]
    schedules = [SCHEDULES[program.schedule](each) for each in optimizers] if program.schedule else []
    data = examples(program.samples)
    loader, valid = kit.loader(data, drop_last=program.drop_last), kit.loader(examples(40), 10)
    wrapped = kit.wrap(model, optimizers, *([schedules] if schedules and program.schedule_given else []))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if program.average == "torch" else None
    own_average = [each.detach().clone() for each in trained] if program.average == "own" else []
    batches = 0
    best, best_loss = copy.deepcopy(model.state_dict()), float("inf")

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse(wrapped(x), y)
        if program.penalty:
            loss = loss + 0.01 * sum((each**2).sum() for each in trained if each.requires_grad)
        return loss / program.accumulate

    def zero() -> None:
        for each in optimizers:
            each.zero_grad()

    def update() -> None:
        if program.clip:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        for each in optimizers:
            each.step()
        if averaged is not None:
            averaged.update_parameters(model)
        for mine, theirs in zip(own_average, trained, strict=True) if own_average else ():
            mine.lerp_(theirs.detach(), 0.1)
        if not program.schedule_by_epoch:
            for schedule in schedules:
                schedule.step()

    for epoch in kit.epochs(EPOCHS):
        for when, wanted in ((program.freeze, False), (program.thaw, True)):
            if when is not None and epoch == when[0]:
                layers[when[1]].requires_grad_(wanted)
                for each in layers[when[1]].parameters() if not wanted else ():
                    each.grad = None
        wrapped.train()
        for x, y in loader:
            if program.skip == "before" and x.max() > LARGE:
                continue
            if program.closure:

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    zero()
                    loss = loss_of(x, y)
                    loss.backward()
                    return loss

                optimizers[0].step(closure)
                continue
            if batches % program.accumulate == 0 and not program.zero_behind:
                zero()
            loss = loss_of(x, y)
            if program.skip == "forward" and x.max() > LARGE:
                continue
            loss.backward(retain_graph=program.two_losses)
            if program.two_losses:
                (0.1 * loss).backward()
            if program.skip == "backward" and x.max() > LARGE:
                zero()
                continue
            batches += 1
            if batches % program.accumulate == 0:
                update()
                if program.zero_behind:
                    zero()
        if program.schedule_by_epoch:
            for schedule in schedules:
                schedule.step()
        if program.evaluates or program.keeps_best:
            wrapped.eval()
            with torch.no_grad():
                # The same on all replicas: of the whole data, and by the model itself.
                found = float(mse(model(valid.dataset.tensors[0]), valid.dataset.tensors[1]))
            if found < best_loss:
                best, best_loss = copy.deepcopy(model.state_dict()), found
        if epoch + 1 >= program.stops_at:
            break
    if program.keeps_best:
        model.load_state_dict(best)
    result = [*weights_of(model), *(float(group["lr"]) for each in optimizers for group in each.param_groups)]
    if averaged is not None:
        result += weights_of(averaged)
    return [*result, *(float(value) for each in own_average for value in each.flatten())]
