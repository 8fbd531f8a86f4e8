"""A sharded model trains as one process does, of whatever shape its replicas are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, remaining_epochs_until
from dist_core.larger.sharded import ElasticFullyShard
from dist_core.trial.current import get_core
from tests.support.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 38, 10, 3


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(model: nn.Module) -> list[list[float]]:
    """Its weights, gathered where they are sharded."""
    full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return [each.detach().flatten().tolist() for each in full]


def train(members: int, kind: str, num_samples: int = SAMPLES, batch: int = BATCH) -> dict[str, Any]:
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    model = network()
    optimizer = optimizer_of(kind, model)
    wrapped = ElasticFullyShard(model, optimizer, noise_every=1)
    loader = AdaptiveDataLoader(torch.utils.data.Subset(samples(), range(num_samples)), batch_size=batch, shuffle=True)
    norms = []
    for _ in remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
    core = get_core()
    statistics = wrapped.statistics
    return {
        "weights": whole(model),
        "full": [each.flatten().tolist() for each in wrapped.full_state_dict().values()],
        "norms": norms,
        "steps": core.position.steps,
        "local": sum(
            each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in model.parameters()
        ),
        "noise": None if statistics is None else (statistics.sqr, statistics.var),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {kind: run_ranks(train, 1, 1, kind)[0] for kind in ("sgd", "adam")}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize(("replicas", "members"), [(1, 2), (2, 2), (1, 3), (2, 1)])
def test_it_trains_as_one_process(alone: dict[str, dict[str, Any]], replicas: int, members: int, kind: str) -> None:
    results = run_ranks(train, replicas * members, members, kind)
    expected = alone[kind]
    for result in results:
        assert result["steps"] == expected["steps"]
        for mine, theirs in zip(result["weights"], expected["weights"], strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert results[0]["full"] == results[0]["weights"]


def test_each_process_keeps_its_part(alone: dict[str, dict[str, Any]]) -> None:
    results = run_ranks(train, 3, 3, "sgd")
    whole = alone["sgd"]["local"]
    assert sum(result["local"] for result in results) == whole
    assert max(result["local"] for result in results) <= 0.4 * whole


def test_the_noise_scale_of_two_replicas_is_measured_on_shards() -> None:
    # Of batches whose halves both kinds of replicas have.
    sharded = run_ranks(train, 4, 2, "sgd", 36, 12)
    plain = run_ranks(train, 2, 1, "sgd", 36, 12)
    assert plain[0]["noise"] is not None
    for result in sharded:
        assert result["noise"] == pytest.approx(plain[0]["noise"], rel=1e-3)
