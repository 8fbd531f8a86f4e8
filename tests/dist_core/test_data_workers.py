"""Worker processes of data loaders: they stay as long as a loop runs, and the loss of one is told from an error."""

from __future__ import annotations

import gc
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dist_core
from dist_core.torch_private import killed_data_workers
from dist_core.trial.current import get_core
from tests.support.habits import network
from tests.support.ranks import run_ranks


class WhoReads(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), torch.ones(6)


def pids_by_epoch(persistent: bool) -> list[list[int]]:
    """Of the workers, while the batch size changes at every step."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = dist_core.AdaptiveDataLoader(WhoReads(), batch_size=4, num_workers=1, persistent_workers=persistent)
    loader.autoscale_batch_size(16, local_bsz_bounds=(1, 16))
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer)
    core, epochs = get_core(), []
    for _ in dist_core.remaining_epochs_until(2):
        pids: set[int] = set()
        for number, (readers, x) in enumerate(loader):
            assert core.adaptation is not None
            core.adaptation.use(3 + number % 3, 0)
            pids.update(readers.tolist())
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
        epochs.append(sorted(pids))
    return epochs


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_stay_when_the_batch_size_changes(persistent: bool) -> None:
    [(first, second)] = run_ranks(pids_by_epoch, 1, persistent)
    assert len(first) == len(second) == 1
    assert (first == second) is persistent


class Augmented(Dataset[Any]):
    """Samples whose content is what a worker's generators draw for them."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        drawn = torch.tensor([float(torch.rand(())), float(np.random.rand()), random.random()])
        return index, drawn


def augmentation() -> list[list[float]]:
    """All that this replica's two workers drew in two epochs."""
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = dist_core.AdaptiveDataLoader(Augmented(), batch_size=12, num_workers=2, shuffle=True)
    wrapped = dist_core.AdaptiveDataParallel(model, optimizer)
    drawn = []
    for _ in dist_core.remaining_epochs_until(2):
        for _numbers, x in loader:
            drawn += x.tolist()
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
    return drawn


def test_workers_of_all_replicas_draw_different_numbers_and_the_same_in_another_run() -> None:
    first = run_ranks(augmentation, 2)
    for column in range(3):
        numbers = [row[column] for replica in first for row in replica]
        assert len(numbers) == len(set(numbers)) == 2 * 48
    assert run_ranks(augmentation, 2) == first


def kill_a_worker() -> tuple[list[int], list[int], int]:
    batches = iter(DataLoader(WhoReads(), batch_size=1, num_workers=1))
    [pid], _ = next(batches)
    before = killed_data_workers(RuntimeError("of the user's"))
    try:
        os.kill(int(pid), signal.SIGKILL)
        while True:
            next(batches)
    except (RuntimeError, OSError, EOFError) as error:
        return before, killed_data_workers(error), int(pid)


def test_a_worker_that_was_killed_is_told_from_an_error_of_the_users() -> None:
    [(before, after, pid)] = run_ranks(kill_a_worker, 1)
    assert before == []
    assert after == [pid]


def kill_a_worker_and_hear_of_it_late() -> tuple[list[int], int]:
    """The kernel's word comes while one looks for what an error of the worker's connection may mean."""
    batches = iter(DataLoader(WhoReads(), batch_size=1, num_workers=1))
    pid = int(next(batches)[0])
    hear = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    look = gc.get_objects

    def interrupted() -> list[Any]:
        assert callable(hear)
        hear(signal.SIGCHLD, None)
        return look()

    gc.get_objects = interrupted  # type: ignore[assignment]
    try:
        return killed_data_workers(ConnectionResetError("by the worker")), pid
    finally:
        gc.get_objects = look


def test_the_kernels_word_of_a_killed_worker_may_come_while_one_looks() -> None:
    [(found, pid)] = run_ranks(kill_a_worker_and_hear_of_it_late, 1)
    assert found == [pid]
