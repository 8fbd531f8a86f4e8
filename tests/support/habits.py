"""Runs a training loop as people write it, once in plain PyTorch and once as an elastic trial, on the same data.

A habit is a function of a ``Kit``: the same code trains both ways, and returns the weights it ends with. Elastic runs
take 1, 2 or 3 replicas, divide a step into several passes if they are told to, and in the case ``RESCALED`` grow from
one replica to three, of which one is killed a few steps later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dist_core
import dist_core.data.batch_size
import dist_core.training.loader
import dist_core.training.training_loop
from dist_core.errors import PeerLost, ReplicaExit
from dist_core.goodput import BatchBounds
from dist_core.trial.current import get_core
from dist_core.trial.plain_replica import run_training
from dist_core.trial.replica import Replica
from tests.support.director import directing, environment_of
from tests.support.ranks import run_ranks
from tests.support.waiting import until

SAMPLES, BATCH = 96, 24
GROW_AT, KILL_AT = 3, 7
"""Optimizer steps: of 4 an epoch, 12 in all."""
RESCALED = 0
"""Instead of a number of replicas."""
FROZEN = "frozen in a step"
EARLIER = "in an epoch's second step"
LATE_IN_AN_EVALUATION = "late in an evaluation"
LOST = {
    FROZEN: lambda core: core.round.launch,
    "in a step": lambda core: core.round.launch,
    EARLIER: lambda core: core.round.launch,
    "between two updates": lambda core: core.record.counts_update,
    "in the body": lambda core: core.rendezvous.do,
    "in an evaluation": lambda core: core.departure.leave_evaluation_if_asked,
    LATE_IN_AN_EVALUATION: lambda core: core.departure.leave_evaluation_if_asked,
    "at the end of a loop": lambda core: core.loops.end,
}
"""Where one of three replicas is killed, once it has come to step ``KILL_AT``: before it makes this call."""
LATE_BATCH = 5
"""Of its share of the epoch's evaluations."""
FROZEN_SECONDS = 4.0
"""A frozen one keeps its connections for so long, and only the scheduler tells of its loss."""
GROWN = -1
"""As RESCALED, but nobody is lost."""
PAIR = -2
"""Two replicas of a scheduler from the start, and not of torchrun."""


def examples(count: int = SAMPLES, width: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, x[:, :1] * 2.0 + 0.3 * torch.randn(count, 1, generator=generator))


class Numbered(Dataset[Any]):
    """The samples of a dataset with their numbers."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return index, self._data[index]


def network(*, seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 1))


@dataclass
class Kit:
    """What differs between the two ways of training."""

    elastic: bool

    def loader(self, data: Dataset[Any], batch: int = BATCH, **options: Any) -> Any:
        return (dist_core.AdaptiveDataLoader if self.elastic else DataLoader)(data, batch_size=batch, **options)

    def wrap(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        return dist_core.AdaptiveDataParallel(model, *arguments, **options) if self.elastic else model

    def epochs(self, number: int) -> Iterator[int]:
        return dist_core.remaining_epochs_until(number) if self.elastic else iter(range(number))


Habit = Callable[[Kit], Any]


def hear(words: list[str]) -> None:
    """Append what the training core warns of from now on to ``words``."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dist_core").addHandler(handler)


def weights_of(*models: nn.Module) -> list[float]:
    return [float(value) for model in models for each in model.parameters() for value in each.detach().flatten()]


def in_plain_pytorch(habit: Habit) -> Any:
    return habit(Kit(elastic=False))


def as_trial(habit: Habit, replicas: int, passes: int = 1) -> list[Any]:
    """What the habit returned on each replica; RESCALED gives None for the one that is killed.

    ``passes``: forward and backward passes of a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        if replicas > 0:
            return run_ranks(_on_rank, replicas, habit, passes)
        if replicas in (GROWN, PAIR):
            script = [(0,), (0, 1, 2)] if replicas == GROWN else [(0, 1)]
            with directing(script) as director:
                return run_ranks(_on_replica, len(script[-1]), habit, passes, director.url, folder, "", len(script[0]))
        with directing([(0,), (0, 1, 2), (0, 2)]) as director:
            return run_ranks(_on_replica, 3, habit, passes, director.url, folder, "in a step", 1, dies=1)


def with_a_loss(habit: Habit, place: str) -> list[Any]:
    """What the habit returned on each of three replicas, of which the second is killed at that place of ``LOST``."""
    with tempfile.TemporaryDirectory() as folder, directing([(0, 1, 2), (0, 2)]) as director:
        return run_ranks(_on_replica, 3, habit, 1, director.url, folder, place, 3, dies=1)


def with_a_leaver(habit: Habit, missed: str) -> list[Any]:
    """What the habit returned on each of three replicas, of which the first is told to leave: it returns None.

    The third misses the end of the last step with it, ``missed`` "before its update" or "after" it, or "its sums": the
    others have entered the next generation by the time that it comes to heal.
    """
    with tempfile.TemporaryDirectory() as folder, directing([(0, 1, 2), (1, 2)]) as director:
        return run_ranks(_next_to_a_leaver, 3, habit, missed, director.url, folder)


def told_by_one_replica(habit: Habit) -> list[str]:
    """The sentences for the trial's history of a replica that may end before the habit does."""
    with tempfile.TemporaryDirectory() as folder, directing([(0,)]) as director:
        run_ranks(_on_replica, 1, habit, 1, director.url, folder, "", 1, dies=0)
        return list(director.warnings)


def _in_passes(passes: int) -> None:
    """Divide steps of a fixed size into so many passes: there is no need to wait until goodput asks for it."""

    def choice(bounds: BatchBounds, num_replicas: int) -> tuple[int, int]:
        return -(-bounds.init_batch // (num_replicas * passes)), passes - 1

    for module in (dist_core.data.batch_size, dist_core.training.loader, dist_core.training.training_loop):
        module.fixed_choice = choice  # type: ignore[attr-defined]  # where it is looked up


def _on_rank(habit: Habit, passes: int) -> Any:
    torch.set_num_threads(1)
    _in_passes(passes)
    return habit(Kit(elastic=True))


def _on_replica(habit: Habit, passes: int, url: str, folder: str, place: str, first: int) -> Any:
    """``first``: how many replicas the trial begins with."""
    torch.set_num_threads(1)
    _in_passes(passes)
    index = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment_of(url, index, Path(folder), replicas=first).to_environ())
    core = get_core()
    assert core.channel is not None and core.membership is not None
    _follow_the_script(core, place)
    try:
        return run_training(core, lambda: habit(Kit(elastic=True)))
    finally:
        core.close()


def _next_to_a_leaver(habit: Habit, missed: str, url: str, folder: str) -> Any:
    torch.set_num_threads(1)
    index = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment_of(url, index, Path(folder), replicas=3).to_environ())
    core = get_core()
    if index == 0:
        _ask_to_leave(core)
    if index == 2:
        if missed == "its sums":
            _miss_the_last_sums(core)
        else:
            _miss_the_last_round(core, missed)
    try:
        return run_training(core, lambda: habit(Kit(elastic=True)))
    except (ReplicaExit, PeerLost):
        return None
    finally:
        core.close()


def _ask_to_leave(core: Replica) -> None:
    finish_step = core.steps.finish

    def asking(loader: Any, global_batch: int) -> None:
        assert core.channel is not None and core.membership is not None
        if core.position.steps == KILL_AT:
            core.channel.request("POST", "/leaving", {})
            until(core.membership.pending)
        finish_step(loader, global_batch)

    core.steps.finish = asking  # type: ignore[method-assign]  # this one replica's


def _miss_the_last_sums(core: Replica) -> None:
    settle = core.sums.settle

    def missing() -> None:
        before, meetings = [each.state_dict() for each in core.sums], core.record.meetings
        settle()
        last = core.joined and core.generation.number == 1 and core.membership and core.membership.pending() is not None
        if last and core.generation.broken is None:
            for each, state in zip(core.sums, before, strict=True):
                each.load_state_dict({**state, "own": state["pending"], "pending": {}})
            core.record.meetings = meetings
            time.sleep(0.3)
            core.generation.mark_broken("as if the one that leaves had gone too early")

    core.sums.settle = missing  # type: ignore[method-assign]  # this one replica's


def _miss_the_last_round(core: Replica, missed: str) -> None:
    wait, finish = core.round.wait, core.round.finish

    def is_last() -> bool:
        going_on = core.round._round
        return core.joined and core.generation.number == 1 and going_on is not None and going_on["generation"][0] == 3.0

    def miss() -> None:
        time.sleep(0.3)
        core.generation.mark_broken("as if the one that leaves had gone too early")

    def missing_wait() -> None:
        wait()
        if missed == "before its update" and is_last():
            miss()

    def missing_finish() -> Any:
        core.round.wait()
        last = is_last()
        agreed = finish()
        if last and core.generation.broken is None:
            miss()
        return agreed if core.generation.broken is None else None

    core.round.wait = missing_wait  # type: ignore[method-assign]  # this one replica's
    core.round.finish = missing_finish  # type: ignore[method-assign]


def _follow_the_script(core: Replica, place: str) -> None:
    """Wait at one step until the joiners are there, and die at another."""
    finish_step = core.steps.finish

    def scripted(loader: Any, global_batch: int) -> None:
        assert core.channel is not None and core.membership is not None
        generation = core.generation
        is_alone = generation.joined and generation.group.world_size == 1 and generation.number == 1
        if is_alone and core.position.steps >= GROW_AT and core.membership.pending() is None:
            core.channel.request("POST", "/epoch", {"epoch": core.position.epoch})
            with contextlib.suppress(AssertionError):
                until(core.membership.pending, 30.0)
        finish_step(loader, global_batch)

    if not place:
        core.steps.finish = scripted  # type: ignore[method-assign]  # this one replica's
        return
    call = LOST[place](core)
    calls = 0

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        late = core.position.steps >= (KILL_AT - 2 if place == EARLIER else KILL_AT)
        late = late and (place != "between two updates" or core.record._updates == 1)
        calls += late
        late = late and (place != LATE_IN_AN_EVALUATION or calls == LATE_BATCH)
        group = core.generation.group
        if core.joined and group.world_size == 3 and group.rank == 1 and late:
            if place == FROZEN:
                assert core.channel is not None
                core.channel.request("POST", "/frozen", {})
                time.sleep(FROZEN_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    core.steps.finish = scripted  # type: ignore[method-assign]  # this one replica's
    setattr(call.__self__, call.__name__, deadly)
