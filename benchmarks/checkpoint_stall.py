"""Pause of training for a checkpoint of 300 MB, against one copy of the state and DCP's asynchronous save.

A hundred megabytes of weights with Adam's two moments, trained in one thread. Every few steps a checkpoint is taken;
what training loses is how much longer that step takes than the ones before it (the call, waiting before the optimizer
changes what is still being copied, and computing slower meanwhile). Writing is waited for before the next round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.frame import Measurement
from dist_core.device import device_of
from dist_core.state.checkpoint import CheckpointWriter, load_checkpoint
from dist_core.state.parts import newest_in_parts

ROUNDS = 7


class Training:
    def __init__(self, place: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device_of(place)
        self.model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(100))).to(place)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.x = torch.randn(192, 512, device=place)
        self.step(lambda: None)
        self.step(lambda: None)

    def step(self, before_update: Callable[[], None]) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        before_update()
        self.optimizer.step()
        self._device.mark().wait()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in tensors_of(item)] if isinstance(value, dict) else []


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(kind: str = "cpu") -> list[Measurement]:
    """``kind``: cpu or cuda, where the model is trained."""
    torch.set_num_threads(1)
    training = Training(torch.device(kind))
    tensors = tensors_of(training.state())
    megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
    copies, usual, ours, peers, loaded = [], [], [], [], []
    kept = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder) / "ours", on_error=print)
        stager = DefaultStager(StagingOptions(False, False, False, False))

        def with_ours() -> None:
            writer.save(training.state(), {}, keeps=lambda tensor: tensor.numel() > 1)
            training.step(writer.settle)

        def with_dcp() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saving = async_save(
                    training.state(),
                    checkpoint_id=f"{folder}/dcp",
                    async_checkpointer_type=AsyncCheckpointerType.THREAD,
                    async_stager=stager,
                    no_dist=True,
                )
            training.step(lambda: None)
            pending.append(saving)

        pending: list[Any] = []
        for _ in range(ROUNDS):
            plain = statistics.median(seconds(lambda: training.step(lambda: None)) for _ in range(5))
            usual.append(plain)
            copies.append(seconds(lambda: torch._foreach_copy_(kept, tensors)))
            ours.append(seconds(with_ours) - plain)
            while writer.busy:
                time.sleep(0.01)
            found = newest_in_parts(Path(folder) / "ours")
            assert found is not None
            loaded.append(seconds(partial(load_checkpoint, found[0][0])))
            plain = statistics.median(seconds(lambda: training.step(lambda: None)) for _ in range(5))
            peers.append(seconds(with_dcp) - plain)
            saving = pending.pop()
            (saving if not hasattr(saving, "upload_completion") else saving.upload_completion).result()
            shutil.rmtree(f"{folder}/dcp")
            os.sync()
    copy, stall, peer = (1e3 * statistics.median(values) for values in (copies, ours, peers))
    details = {"megabytes": megabytes, "step_ms": 1e3 * statistics.median(usual), "all_ms": [1e3 * s for s in ours]}
    common: dict[str, Any] = {"unit": "ms", "ours": stall, "details": details}
    return [
        Measurement(what=f"stall on {kind}, 300 MB", peer=copy, peer_name="one copy of it", target=1.5, **common),
        Measurement(what=f"stall on {kind}, 300 MB", peer=peer, peer_name="dcp.async_save", target=0.25, **common),
        Measurement(
            what="load, 300 MB", ours=1e3 * statistics.median(loaded), peer=copy, unit="ms", peer_name="one copy"
        ),
    ]
