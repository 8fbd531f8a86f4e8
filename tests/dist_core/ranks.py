"""Runs a function in several processes that find each other as under torchrun; a fork server keeps that fast."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dist_core.replica_preload", "tests.dist_core.ranks"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(
    function: Callable[..., Any], rank: int, world_size: int, port: int, arguments: tuple[Any, ...], answer: Connection
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    answer.close()
    # Groups are not torn down in order across processes; leaving at once keeps their complaints out of the way.
    os._exit(0)


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = 90.0, may_die: bool = False
) -> list[Any]:
    """What the function returned on each rank; ``may_die`` puts None for a process that ended without an answer."""
    port = free_port()
    pipes: list[Connection] = []
    processes = []
    for rank in range(world_size):
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_run, args=(function, rank, world_size, port, arguments, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    results: list[Any] = [None] * world_size
    waiting = set(pipes)
    try:
        while waiting:
            ready = wait(list(waiting), seconds)
            assert ready, f"ranks {[pipes.index(pipe) for pipe in waiting]} did not answer within {seconds} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.discard(pipe)
                rank = pipes.index(pipe)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    assert may_die, f"rank {rank} ended without an answer"
                    continue
                assert succeeded, f"rank {rank}:\n{value}"
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    return results
