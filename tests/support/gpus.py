"""Where tests of the gpu suite put their tensors.

``ELASTUNE_TEST_PLACE=cpu python -m pytest -m gpu`` runs them on a CPU: that checks the tests where no GPU is.
"""

from __future__ import annotations

import os

import pytest
import torch

from dist_core.gradients.reduce import STRATEGIES, reduction_strategy
from tests.support.perceptrons import train

ON_CPU = os.environ.get("ELASTUNE_TEST_PLACE") == "cpu"
GPUS = 0 if ON_CPU else torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2 and not ON_CPU, reason="NCCL takes one rank for each GPU: needs two")
on_a_gpu = pytest.mark.skipif(ON_CPU, reason="of GPUs alone")
EXACT = [name for name in STRATEGIES if reduction_strategy(name).exact]
LOSSY = ["bf16", "fp16"]


def settle_on_a_place(*, shared: bool = True) -> torch.device:
    """This rank's; ``shared``: all ranks are on the first GPU, over Gloo."""
    if ON_CPU:
        return torch.device("cpu")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if shared and world_size > 1:
        os.environ["ELASTUNE_GPU_SHARE"] = str(0.9 / world_size)
    place = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(place)
    return place


def trained(model: str, reduction: str, clip: bool, shared: bool) -> list[float]:
    return train(model, reduction, 11, clip, str(settle_on_a_place(shared=shared)))


def assert_close(weights: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-3, atol=2e-5)
