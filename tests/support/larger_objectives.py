"""An objective over models that are larger than a slot; by itself, for importing what divides them takes a second."""

from __future__ import annotations

import os

import optuna
import torch
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, ElasticModel, remaining_epochs_until
from dist_core.link.environment import SLOT_MEMORY


def takes_the_slots_that_it_needs(trial: optuna.Trial) -> float:
    """Slots of a replica of a model, of which the large one has no room on a slot."""
    os.environ[SLOT_MEMORY] = "2e6"
    width = trial.suggest_categorical("width", [16, 160])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(0))
    loader = AdaptiveDataLoader(TensorDataset(x), batch_size=32)
    wrapped = ElasticModel(model, optimizer, torch.nn.functional.mse_loss, example=x[:2])
    for _ in remaining_epochs_until(3):
        for (inputs,) in loader:
            optimizer.zero_grad()
            wrapped.step(inputs, inputs)
            optimizer.step()
    return float(wrapped.layout.slots)
