"""Fixtures of more than one file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dist_core.trial.current import reset_core
from tests.support.gpus import settle_on_a_place
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


@pytest.fixture
def meeting_place() -> Iterator[str]:
    """Of replicas that meet by a file."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "store")


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    reset_core()
    torch.manual_seed(0)
    yield settle_on_a_place()
    reset_core()
