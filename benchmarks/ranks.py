"""Runs a function in several processes that find each other as under torchrun; rank 0's answer comes back as JSON."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import spawn


def _rank(
    rank: int, function: Callable[..., Any], world_size: int, port: int, arguments: tuple[Any, ...], result: str
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    answer = function(rank, world_size, *arguments)
    if rank == 0:
        Path(result).write_text(json.dumps(answer))
    torch.distributed.barrier()
    # Groups are not torn down in order across processes; leaving at once keeps their complaints out of the way.
    os._exit(0)


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Return rank 0's result of ``function(rank, world_size, *arguments)``, as JSON. One thread a process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/answer.json"
        spawn(_rank, args=(function, world_size, port, arguments, result), nprocs=world_size)
        return json.loads(Path(result).read_text())
