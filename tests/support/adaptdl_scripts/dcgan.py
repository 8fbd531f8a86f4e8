"""Two wrapped models trained in turns the way AdaptDL's DCGAN example does, three passes through one a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

import dist_core.adaptdl as adaptdl
import dist_core.adaptdl.torch as adl
import dist_core.adaptdl.torch._metrics as metrics
from tests.support.adaptdl_scripts.mnist import digits


def main(writer: Any) -> tuple[float, float]:
    torch.manual_seed(2)
    dataloader = adl.AdaptiveDataLoader(digits(800, 1), batch_size=40, num_workers=1, shuffle=False)
    dataloader.autoscale_batch_size(320, local_bsz_bounds=(8, 200))
    adl.init_process_group("gloo")
    net_d = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    net_g = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 144), nn.Unflatten(1, (1, 12, 12)))
    optimizer_d = optim.SGD(net_d.parameters(), lr=5e-3, momentum=0.9, nesterov=True)
    optimizer_g = optim.SGD(net_g.parameters(), lr=5e-3, momentum=0.9, nesterov=True)
    schedule_d = optim.lr_scheduler.StepLR(optimizer_d, 15, 0.1)
    schedule_g = optim.lr_scheduler.StepLR(optimizer_g, 15, 0.1)
    net_d = adl.AdaptiveDataParallel(net_d, optimizer_d, schedule_d, "netD")
    net_g = adl.AdaptiveDataParallel(net_g, optimizer_g, schedule_g, "netG")
    criterion = nn.BCELoss()
    losses = (0.0, 0.0)
    for epoch in adl.remaining_epochs_until(2):
        stats = adl.Accumulator()
        for data in dataloader:
            real = data[0]
            net_d.zero_grad()
            output = net_d(real).view(-1)
            error_real = criterion(output, torch.ones(len(real)))
            error_real.backward()
            fake = net_g(torch.randn(len(real), 10))
            error_fake = criterion(net_d(fake.detach()).view(-1), torch.zeros(len(real)))
            error_fake.backward()
            optimizer_d.step()
            net_g.zero_grad()
            error_g = criterion(net_d(fake).view(-1), torch.ones(len(real)))
            error_g.backward()
            optimizer_g.step()
            stats["g_loss_sum"] += error_g.item()
            stats["d_loss_sum"] += (error_real + error_fake).item()
            stats["steps"] += 1
        stats["norm"] += metrics._metrics_state().grad_params[0]
        stats["replicas"] += 1.0
        schedule_d.step()
        schedule_g.step()
        with stats.synchronized():
            assert stats["replicas"] == adaptdl.env.num_replicas()
            losses = (stats["d_loss_sum"] / stats["steps"], stats["g_loss_sum"] / stats["steps"])
            writer.add_scalar("Loss/D", losses[0], epoch)
        assert adaptdl.get_tensorboard_dir().endswith(adaptdl.env.job_id())
    return losses
