"""Recommendation trained the way AdaptDL's NCF example does: data redrawn each epoch, ranking batch by batch, Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import Dataset

import dist_core.adaptdl.torch as adl

USERS, ITEMS, PER_USER = 30, 40, 20


class Ratings(Dataset[Any]):
    def __init__(self, training: bool) -> None:
        self.training = training
        self.rows = np.zeros((USERS * PER_USER, 3), dtype=np.int64)
        self.draws = 0
        if not training:
            self.ng_sample()

    def ng_sample(self) -> None:
        chance = np.random.default_rng(self.draws)
        self.draws += 1
        for user in range(USERS):
            items = chance.permutation(ITEMS)[:PER_USER]
            # The first row of each user in the test data is the item to be ranked first.
            items[0] = user
            self.rows[user * PER_USER : (user + 1) * PER_USER] = [
                (user, item, int((user - item) % ITEMS < 3)) for item in items
            ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        user, item, label = self.rows[index]
        return user, item, np.float32(label)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 12), nn.Embedding(ITEMS, 12)
        self.unused = nn.Linear(2, 2)
        self.layers = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(torch.cat([self.users(user), self.items(item)], dim=1)).view(-1)
        return out


def hit_ratio(model: Any, test_loader: Any) -> float:
    hits = []
    for user, item, _ in test_loader:
        assert len(set(user.tolist())) == 1
        ranked = item[model(user, item).topk(5).indices]
        hits.append(float(item[0] in ranked))
    return float(np.mean(hits))


def main() -> float:
    torch.manual_seed(0)
    train_loader = adl.AdaptiveDataLoader(Ratings(True), batch_size=64, shuffle=True, num_workers=1, drop_last=True)
    test_loader = adl.AdaptiveDataLoader(Ratings(False), batch_size=PER_USER, shuffle=False, num_workers=0)
    train_loader.autoscale_batch_size(256, local_bsz_bounds=(16, 128), gradient_accumulation=True)
    adl.init_process_group("gloo")
    network = Network()
    optimizer = optim.Adam(network.parameters(), lr=0.01)
    wrapped = adl.AdaptiveDataParallel(network, optimizer, find_unused_parameters=True)
    ratio = 0.0
    for _ in adl.remaining_epochs_until(12):
        wrapped.train()
        train_loader.dataset.ng_sample()
        for user, item, label in train_loader:
            wrapped.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(wrapped(user, item), label).backward()
            optimizer.step()
            assert wrapped.gain >= 1.0
        wrapped.eval()
        stats = adl.Accumulator()
        stats["HR"] += hit_ratio(wrapped, test_loader)
        stats["replicas"] += 1.0
        with stats.synchronized():
            ratio = stats["HR"] / stats["replicas"]
    assert isinstance(wrapped._state.model, Network)
    return ratio
