"""Batch norms over all replicas: torch's own synchronized one, on its arithmetic for a CPU.

torch has its kernels for GPUs only. What reaches the replicas, forward and backward, is torch's code.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

from tests.support.habits import RESCALED, Habit, Kit, as_trial, examples, in_plain_pytorch, weights_of


def stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), (x.var(0, correction=0) + eps).rsqrt()


def gather_stats(
    x: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts, total = counts[:, None], counts.sum()
    mean = (parts * means).sum(0) / total
    var = (parts * (invstds**-2 - eps + (means - mean) ** 2)).sum(0) / total
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def apply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, eps: float
) -> torch.Tensor:
    return (x - mean) * invstd * weight + bias


def reduce_backward(
    slope: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor, *wanted: bool
) -> tuple[torch.Tensor, ...]:
    product = (slope * (x - mean)).sum(0)
    return slope.sum(0), product, product * invstd, slope.sum(0)


def apply_backward(
    slope: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    slopes: torch.Tensor,
    products: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    total = counts.sum()
    return (slope - slopes / total - (x - mean) * invstd**2 * products / total) * invstd * weight


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": apply,
    "batch_norm_backward_reduce": reduce_backward,
    "batch_norm_backward_elemt": apply_backward,
}


class Synchronized(nn.SyncBatchNorm):
    """As ``torch.nn.SyncBatchNorm`` decides it, without its look at the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size() if self.training and dist.is_initialized() else 1
        if size == 1:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
        mean, var = self.running_mean, self.running_var
        found: torch.Tensor = SyncBatchNorm.apply(
            x, self.weight, self.bias, mean, var, self.eps, self.momentum, dist.group.WORLD, size
        )
        return found


def training(kit: Kit) -> list[float]:
    return train(kit)


def training_in_odd_parts(kit: Kit) -> list[float]:
    """Shares of 13 and 12, or 9, 8 and 8 examples."""
    return train(kit, batch=25)


def training_with_a_loss(kit: Kit) -> list[float]:
    """A body that runs again tells the running statistics of its batch twice, as it does those of any batch norm."""
    return train(kit, loses_a_step=True)


def train(kit: Kit, *, batch: int = 24, loses_a_step: bool = False) -> list[float]:
    torch.manual_seed(0)
    norm = Synchronized if kit.elastic else nn.BatchNorm1d
    normed = norm(8)
    model = nn.Sequential(nn.Linear(6, 8), normed, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = kit.loader(examples(4 * batch), batch)
    # DDP refuses the layer for a model on a CPU.
    with mock.patch.object(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle"):
        wrapped = kit.wrap(model, optimizer)
    with mock.patch.dict(vars(torch), KERNELS):
        for _ in kit.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
    assert normed.running_mean is not None
    return [*weights_of(model), *(float(each) for each in normed.running_mean if not loses_a_step)]


@pytest.mark.parametrize(
    ("replicas", "trains"),
    [
        (1, training),
        (2, training),
        (3, training),
        (2, training_in_odd_parts),
        (3, training_in_odd_parts),
        (RESCALED, training_with_a_loss),
    ],
)
def test_a_synchronized_batch_norm_sees_the_whole_batch(replicas: int, trains: Habit) -> None:
    expected = in_plain_pytorch(trains)
    ends = [end for end in as_trial(trains, replicas) if end is not None]
    assert len(ends) == (2 if replicas == RESCALED else replicas)
    for end in ends:
        assert end == pytest.approx(expected, abs=1e-5)
