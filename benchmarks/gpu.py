"""All that a GPU changes, in one command: steps, checkpoints, and whether the times that training learns are true.

On one GPU two replicas share it and reduce through the host's memory; with two, over NCCL. A GPU is behind what it was
given, so the last figure is the one that everything else of the scheduler rests on: what the throughput model was told
of a step against the clock, with the device waited for.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import checkpoint_stall, step_overhead
from benchmarks.frame import Measurement
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.device import device_of
from dist_core.trial.current import get_core, reset_core

STEPS = 60
EXAMPLES = 2048


def measure() -> list[Measurement]:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch finds none here")
    return [*step_overhead.measure(kind="cuda"), *checkpoint_stall.measure("cuda"), told_of_a_step("cuda")]


def told_of_a_step(kind: str) -> Measurement:
    place = torch.device(kind)
    device = device_of(place)
    reset_core()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(1024, 1024), nn.ReLU()))).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(EXAMPLES * STEPS, 1024)), batch_size=EXAMPLES)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.to(place)).square().mean().backward()
            optimizer.step()
    adaptation = get_core().adaptation
    assert adaptation is not None
    (told,) = adaptation.profile.observations()
    x, took = torch.randn(EXAMPLES, 1024), []
    for _ in range(15):
        device.mark().wait()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x.to(place)).square().mean().backward()
        optimizer.step()
        device.mark().wait()
        took.append(time.perf_counter() - began)
    reset_core()
    return Measurement(
        what=f"step time on {kind} as the throughput model is told",
        ours=1e3 * told.optim_seconds,
        peer=1e3 * statistics.median(took),
        unit="ms",
        peer_name="the clock, the device waited for",
    )
