"""A torch that is too old for a feature is named, and the feature with it."""

from __future__ import annotations

import pytest
import torch

import dist_core.torch_private
from dist_core.device import device_of
from dist_core.errors import InvalidTraining
from dist_core.generations.model_parallel import ModelParallelGroup


def test_a_replica_of_several_slots_needs_a_torch_that_divides_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_core.torch_private, "RELEASE", (2, 9))
    group = ModelParallelGroup(None, None)
    alone = group.group(device_of(torch.device("cpu")))
    assert alone.world_size == 1
    several = ModelParallelGroup(None, None)
    several.members = 2
    with pytest.raises(InvalidTraining, match=r"needs torch 2\.11 or newer; this is torch .* one slot per replica"):
        several.group(device_of(torch.device("cpu")))
