"""A classifier trained the way AdaptDL's tutorial trains MNIST, all steps of it; on digits made up here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import dist_core.adaptdl as adaptdl


def digits(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    prototypes = torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return TensorDataset(prototypes[labels] + 0.3 * torch.randn(count, 1, 12, 12, generator=generator), labels)


def train(model: Any, device: Any, train_loader: Any, optimizer: Any, epoch: int, seen: list[int]) -> None:
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        seen.append(len(data))
        if batch_idx % 10 == 0:
            print(f"epoch {epoch} {batch_idx * len(data)}/{len(train_loader.dataset)} of {len(train_loader)}")


def test(model: Any, device: Any, test_loader: Any, writer: Any, epoch: int) -> float:
    model.eval()
    stats = adaptdl.torch.Accumulator()
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            stats["test_loss"] += nn.functional.nll_loss(output, target.to(device), reduction="sum").item()
            stats["correct"] += output.argmax(dim=1).eq(target).sum().item()
            stats["seen"] += len(target)
    with stats.synchronized():
        assert stats["seen"] == len(test_loader.dataset)
        accuracy: float = stats["correct"] / len(test_loader.dataset)
        writer.add_scalar("Test/Accuracy", accuracy, epoch)
    return accuracy


def main(writer: Any, epochs: int = 4) -> tuple[float, int]:
    torch.manual_seed(1)
    device = torch.device("cpu")
    train_loader = adaptdl.torch.AdaptiveDataLoader(digits(2000, 1), drop_last=True, batch_size=64, shuffle=True)
    train_loader.autoscale_batch_size(1028, local_bsz_bounds=(32, 128))
    test_loader = adaptdl.torch.AdaptiveDataLoader(digits(500, 2), batch_size=64)
    adaptdl.torch.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(dim=1))
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    wrapped = adaptdl.torch.AdaptiveDataParallel(model, optimizer, scheduler)
    accuracy, seen = 0.0, []
    for epoch in adaptdl.torch.remaining_epochs_until(epochs):
        train(wrapped, device, train_loader, optimizer, epoch, seen)
        accuracy = test(wrapped, device, test_loader, writer, epoch)
        train_loader.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Data")
        wrapped.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Model/")
        scheduler.step()
    return accuracy, sum(seen)
