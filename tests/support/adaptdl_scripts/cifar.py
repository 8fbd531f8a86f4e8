"""Images trained the way AdaptDL's CIFAR example does: a group per parameter, a rule as fourth argument, AMP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import dist_core.adaptdl as adaptdl
import dist_core.adaptdl.torch as adl
from dist_core.adaptdl.torch.scaling_rules import AdaScale
from tests.support.adaptdl_scripts.mnist import digits


def main(writer: Any, mixed_precision: bool) -> float:
    torch.manual_seed(1)
    adl.init_process_group("gloo")
    if adaptdl.env.replica_rank() == 0:
        trainset = digits(1500, 1)
        dist.barrier()
    else:
        dist.barrier()
        trainset = digits(1500, 1)
    trainloader = adl.AdaptiveDataLoader(trainset, batch_size=32, shuffle=True, num_workers=1, drop_last=True)
    trainloader.autoscale_batch_size(256, local_bsz_bounds=(16, 64), gradient_accumulation=True)
    validloader = adl.AdaptiveDataLoader(digits(300, 2), batch_size=100, shuffle=False, num_workers=1)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 10)
    )
    criterion = nn.CrossEntropyLoss()
    groups = [{"params": [parameter]} for parameter in net.parameters()]
    optimizer = optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = optim.lr_scheduler.MultiStepLR(optimizer, [30, 45], 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=True) if mixed_precision else None
    if mixed_precision:
        wrapped = adl.AdaptiveDataParallel(net, optimizer, lr_scheduler, scaler)
    else:
        wrapped = adl.AdaptiveDataParallel(net, optimizer, lr_scheduler, AdaScale())
    accuracy = 0.0
    for epoch in adl.remaining_epochs_until(3):
        wrapped.train()
        stats = adl.Accumulator()
        assert wrapped.gain >= 1.0
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=mixed_precision):
                outputs = wrapped(inputs)
                loss = criterion(outputs, targets)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            stats["loss_sum"] += loss.item() * targets.size(0)
            stats["total"] += targets.size(0)
            stats["correct"] += outputs.max(1)[1].eq(targets).sum().item()
            assert trainloader.current_batch_size >= 32
            assert trainloader.accumulation_steps >= 0
        trainloader.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Data/")
        wrapped.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Model/")
        with stats.synchronized():
            stats["loss_avg"] = stats["loss_sum"] / stats["total"]
            print("Train:", stats)
        wrapped.eval()
        valid = adl.Accumulator()
        with torch.no_grad():
            for inputs, targets in validloader:
                valid["total"] += targets.size(0)
                valid["correct"] += wrapped(inputs).max(1)[1].eq(targets).sum().item()
        with valid.synchronized():
            accuracy = valid["correct"] / valid["total"]
        lr_scheduler.step()
    return accuracy
