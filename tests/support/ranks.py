"""Runs a function in several processes that find each other as under torchrun.

They are forked from a nursery, a process that has torch and the function's module in memory, so that one costs
milliseconds and begins as a fresh one all the same. The address at which ranks meet belongs to the caller from the
start: nobody has to find a port that is still free when rank 0 binds it. What a rank prints is kept, and shown when it
fails or ends without a word.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dist_core.replica_preload", "tests.support.ranks"])

LEAVING_SECONDS = 5.0
"""How long a rank that has answered may take to end by itself."""
ALONE_SECONDS = 15.0
"""How long a rank may take to answer once another has failed."""
WORDS_SHOWN = 6000


@dataclass(frozen=True, slots=True)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    port: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a rank ended: with a value, or with the reason why there is none."""

    value: Any
    why: str | None = None
    answered: bool = True

    def told(self, rank: int) -> str:
        return f"rank {rank} {self.why}"


class _Rank:
    """A process of a job, as the nursery sees it. ``jobs``: the nursery's own line, of which a rank knows nothing."""

    def __init__(self, job: _Job, rank: int, jobs: Connection) -> None:
        self._words = tempfile.TemporaryFile()
        self.answer, theirs = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            jobs.close()
            _become(job, rank, theirs, self._words.fileno())
        theirs.close()

    def ending(self) -> _Ending:
        try:
            succeeded, value = self.answer.recv()
        except EOFError:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            return _Ending(None, f"ended without an answer, by {how}{self.words()}", answered=False)
        return _Ending(value) if succeeded else _Ending(None, f"raised\n{value}{self.words()}")

    def words(self) -> str:
        """What it printed last."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - WORDS_SHOWN))
        text = self._words.read().decode(errors="replace")
        return f"\nit printed:\n{text}" if text else ""

    def end(self) -> None:
        self.answer.close()
        deadline = time.monotonic() + LEAVING_SECONDS
        while self.pid and os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.001)
        self._words.close()


def _become(job: _Job, rank: int, answer: Connection, words: int) -> None:
    os.dup2(words, 1)
    os.dup2(words, 2)
    # As in a replica: before threads of its own come to it.
    torch.set_num_threads(1)
    # Words of a signal that ends this process: where each of its threads was.
    faulthandler.enable(words)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        # As torchrun does it: the store is there before the ranks are, and is none of theirs.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        answer.send((True, job.function(*job.arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answer.close()
    # Groups are not torn down in order across processes; leaving at once keeps their complaints out of the way.
    os._exit(0)


def _run(job: _Job, jobs: Connection) -> list[_Ending]:
    ranks = [_Rank(job, rank, jobs) for rank in range(job.world_size)]
    endings: list[_Ending | None] = [None] * len(ranks)
    deadline, why = time.monotonic() + job.seconds, f"did not answer within {job.seconds} s"
    try:
        while missing := [rank for rank, ending in enumerate(endings) if ending is None]:
            answers = [ranks[rank].answer for rank in missing]
            ready = wait(answers, max(0.0, deadline - time.monotonic()))
            for rank in missing:
                if ranks[rank].answer in ready:
                    endings[rank] = ending = ranks[rank].ending()
                    if ending.why is not None and ending.answered:
                        # The others may wait for it, and nobody tells them.
                        deadline = min(deadline, time.monotonic() + ALONE_SECONDS)
                        why = f"did not answer within {ALONE_SECONDS} s of rank {rank}'s error"
                elif not ready:
                    os.kill(ranks[rank].pid, signal.SIGKILL)
                    endings[rank] = _Ending(None, why + ranks[rank].words())
    finally:
        for each in ranks:
            each.end()
    return [ending for ending in endings if ending is not None]


def _serve(jobs: Connection) -> None:
    """The nursery: until its owner is gone."""
    # Workers of data loaders start as in a script; a server of forks for each rank would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    # Preloaded already, unless the server of forks could not: then the reason is seen here.
    importlib.import_module("dist_core.replica_preload")
    while True:
        try:
            job: _Job = jobs.recv()
        except EOFError:
            return
        # No rank's collections look at what was here before it.
        gc.freeze()
        jobs.send(_run(job, jobs))


class _Nursery:
    def __init__(self) -> None:
        self._jobs, theirs = _context.Pipe()
        self._process: BaseProcess = _context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        atexit.register(self.close)

    def run(self, job: _Job) -> list[_Ending]:
        self._jobs.send(job)
        endings: list[_Ending] = self._jobs.recv()
        return endings

    def close(self) -> None:
        self._jobs.close()
        self._process.join(LEAVING_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self.close()


_nursery: _Nursery | None = None


@contextmanager
def meeting_place() -> Iterator[int]:
    """The port of a store of ours, at which ranks find each other."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    yield store.port


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = 90.0, dies: int | None = None
) -> list[Any]:
    """What the function returned on each rank; None for rank ``dies`` if it ended without an answer, as it may."""
    global _nursery
    if _nursery is None:
        _nursery = _Nursery()
    try:
        with meeting_place() as port:
            endings = _nursery.run(_Job(function, arguments, world_size, port, seconds))
    except BaseException:
        # A test that ran out of time leaves an answer on the line, which is not the next one's.
        _nursery.kill()
        _nursery = None
        raise
    amiss = {rank: ending for rank, ending in enumerate(endings) if ending.why is not None}
    failed = [rank for rank, ending in amiss.items() if ending.answered or rank != dies]
    assert not failed, "\n".join(ending.told(rank) for rank, ending in amiss.items())
    return [ending.value for ending in endings]
