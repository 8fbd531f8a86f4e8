"""Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dist_core.trial.core import reset_core
from tests.support.perceptrons import train


@pytest.fixture
def fresh_core() -> Iterator[None]:
    reset_core()
    torch.manual_seed(0)
    yield
    reset_core()


@pytest.fixture(scope="module")
def alone() -> Callable[..., torch.Tensor]:
    """Weights of the same training in one process, and before it."""

    def run(model_name: str, batch: int = 11, clip: bool = False) -> torch.Tensor:
        return torch.tensor(train(model_name, "all_reduce", batch, clip))

    return run
