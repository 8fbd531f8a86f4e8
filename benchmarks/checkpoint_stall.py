"""How long training stops for a checkpoint of 300 MB: against one copy of the state, and DCP's asynchronous save.

A hundred megabytes of weights with Adam's two moments. What counts is the call on the training thread; the writing
goes on beside it, and is waited for between two rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.frame import Measurement
from dist_core.checkpoint import CheckpointWriter, load_checkpoint, newest_checkpoint

ROUNDS = 7


def state() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(100)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in tensors_of(item)] if isinstance(value, dict) else []


def measure() -> list[Measurement]:
    torch.set_num_threads(1)
    content = state()
    tensors = tensors_of(content)
    megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
    copies, ours, peers, written, loaded = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder) / "ours", on_error=print)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        for number in range(ROUNDS):
            began = time.perf_counter()
            clones = [tensor.clone() for tensor in tensors]
            copies.append(time.perf_counter() - began)
            del clones
            began = time.perf_counter()
            writer.save(content, {"epoch": number})
            ours.append(time.perf_counter() - began)
            while writer.busy:
                time.sleep(0.01)
            written.append(time.perf_counter() - began)
            found = newest_checkpoint(Path(folder) / "ours")
            assert found is not None
            began = time.perf_counter()
            load_checkpoint(found[0])
            loaded.append(time.perf_counter() - began)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                began = time.perf_counter()
                saving = dcp.async_save(
                    content,
                    checkpoint_id=f"{folder}/dcp-{number}",
                    async_checkpointer_type=AsyncCheckpointerType.THREAD,
                    async_stager=stager,
                    no_dist=True,
                )
                peers.append(time.perf_counter() - began)
                done = saving if not hasattr(saving, "upload_completion") else saving.upload_completion
                done.result()
            os.sync()
    copy, stall, peer = (statistics.median(values) for values in (copies, ours, peers))
    details = {"megabytes": megabytes, "tensors": len(tensors), "written_s": statistics.median(written)}
    common = {"unit": "ms", "ours": 1e3 * stall, "details": details}
    return [
        Measurement(what="stall, 300 MB", peer=1e3 * copy, peer_name="one copy of the state", target=1.5, **common),
        Measurement(what="stall, 300 MB", peer=1e3 * peer, peer_name="dcp.async_save", target=0.25, **common),
        Measurement(
            what="load, 300 MB", ours=1e3 * statistics.median(loaded), peer=1e3 * copy, unit="ms", peer_name="one copy"
        ),
    ]
