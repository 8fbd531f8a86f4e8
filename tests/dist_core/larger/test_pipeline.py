"""A pipeline trains as one process does, by every schedule, with as many replicas as there are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from dist_core import AdaptiveDataLoader, remaining_epochs_until
from dist_core.larger.pipeline import ElasticPipeline
from dist_core.trial.current import get_core
from tests.support.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 38, 10, 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def train(members: int, schedule: str, kind: str = "sgd") -> dict[str, Any]:
    os.environ["ELASTUNE_MEMBERS"] = str(members)
    model = Stack()
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.01)
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    wrapped = ElasticPipeline(
        model, optimizer, nn.functional.mse_loss, example=torch.zeros(2, 6), schedule=schedule, noise_every=1
    )
    loader = AdaptiveDataLoader(samples(), batch_size=BATCH, shuffle=True)
    losses, norms = [], []
    for _ in remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(float(wrapped.step(x, y)))
            norms.append(float(wrapped.clip_grad_norm_(1.0)))
            optimizer.step()
    wrapped.eval()
    with torch.no_grad():
        output = wrapped(torch.ones(5, 6))
    return {
        "weights": {
            name: each.detach().flatten().tolist()
            for stage in wrapped.stages
            for name, each in stage.named_parameters()
        },
        "full": {name: each.flatten().tolist() for name, each in wrapped.full_state_dict().items()},
        "losses": losses,
        "norms": norms,
        "steps": get_core().position.steps,
        "output": output.flatten().tolist(),
        "noise": None if wrapped.statistics is None else (wrapped.statistics.sqr, wrapped.statistics.var),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {kind: run_ranks(train, 1, 1, "1f1b", kind)[0] for kind in ("sgd", "adam")}


@pytest.mark.parametrize(
    ("replicas", "members", "schedule", "kind"),
    [
        (1, 2, "1f1b", "sgd"),
        (1, 2, "1f1b", "adam"),
        (1, 3, "simple", "sgd"),
        (1, 2, "interleaved", "sgd"),
        (2, 2, "interleaved", "adam"),
        (2, 2, "1f1b", "sgd"),
        (2, 1, "1f1b", "adam"),
    ],
)
def test_it_trains_as_one_process(
    alone: dict[str, dict[str, Any]], replicas: int, members: int, schedule: str, kind: str
) -> None:
    results = run_ranks(train, replicas * members, members, schedule, kind)
    expected = alone[kind]
    names: set[str] = set()
    for rank, result in enumerate(results):
        assert result["steps"] == expected["steps"]
        assert result["output"] == pytest.approx(expected["output"], abs=2e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        for name, values in result["weights"].items():
            assert values == pytest.approx(expected["weights"][name], abs=2e-5)
        if rank < members:
            assert names.isdisjoint(result["weights"])
            names |= set(result["weights"])
    assert names == set(expected["weights"])
    assert results[0]["full"] == {
        name: values for each in results[:members] for name, values in each["weights"].items()
    }
    if replicas == 1:
        assert results[0]["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert all(result["losses"] == results[0]["losses"] for result in results)


def test_the_noise_scale_adds_up_over_stages() -> None:
    piped = run_ranks(train, 4, 2, "1f1b")
    plain = run_ranks(train, 2, 1, "1f1b")
    assert plain[0]["noise"] is not None
    for result in piped:
        assert result["noise"] == pytest.approx(plain[0]["noise"], rel=1e-3)
