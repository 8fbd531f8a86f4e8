"""Training code that runs again: from its top after a loss, and around the loops of an epoch that is resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dist_core.data.batch_size
import dist_core.training.loader
import dist_core.training.training_loop
from dist_core import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.errors import ReplicaExit, RunAgain
from dist_core.goodput import BatchBounds
from dist_core.trial.current import get_core, reset_core
from dist_core.trial.plain_replica import run_training


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ELASTUNE_CHECKPOINT_DIR", str(tmp_path))
    reset_core()
    yield
    reset_core()


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float32)[:, None])


class Trial:
    """A linear model that stays as it is, what it trains on, and an evaluation of twenty samples."""

    def __init__(self, optimizer: type[torch.optim.SGD] = torch.optim.SGD, samples: int = 24, batch: int = 8) -> None:
        self.training = AdaptiveDataLoader(numbers(samples), batch)
        self.evaluation = AdaptiveDataLoader(numbers(20), batch_size=5)
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        self.optimizer = optimizer(self.model.parameters(), lr=0.0)
        self.wrapped = AdaptiveDataParallel(self.model, self.optimizer)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.wrapped(x).mean().backward()
        self.optimizer.step()

    def train(self) -> None:
        self.wrapped.train()
        for (x,) in self.training:
            self.step(x)

    def evaluate(self, totals: Accumulator, leaves: bool = False) -> None:
        self.wrapped.eval()
        with torch.no_grad():
            for number, (x,) in enumerate(self.evaluation):
                totals["count"] += len(x)
                if leaves and number == 1:
                    get_core().leaving.ask()


def as_after_a_loss() -> None:
    """What a survivor does once the others have agreed that the evaluation is to run again."""
    get_core().rollback.go_back_behind_loop()
    get_core().rollback._behind_loop = None
    raise RunAgain


def test_an_accumulator_made_between_two_loops_counts_once_however_often_the_trial_leaves() -> None:
    def code(leaves: str) -> list[float]:
        reset_core()
        trial, seen = Trial(), []
        for epoch in remaining_epochs_until(2):
            trial.train()
            totals = Accumulator()
            trial.evaluate(totals, leaves=(leaves, epoch) == ("in the evaluation", 1))
            with totals.synchronized():
                seen.append(totals["count"])
            if (leaves, epoch) == ("behind it", 1):
                get_core().leaving.ask()
                get_core().leave_if_asked()
        return seen

    for place in ("in the evaluation", "behind it"):
        with pytest.raises(ReplicaExit):
            code(place)
    # What the script has kept in its list comes back with the trial, too.
    assert code("never") == [20.0, 20.0]


def test_what_a_synchronized_block_does_counts_where_it_runs_again_from_within() -> None:
    blocks = itertools.count()

    def code() -> list[tuple[int, float]]:
        trial, totals, seen = Trial(), Accumulator(), []
        for epoch in remaining_epochs_until(3):
            trial.train()
            trial.evaluate(totals)
            with totals.synchronized():
                seen.append((epoch, totals["count"]))
                if next(blocks) == 1:
                    as_after_a_loss()
                totals.clear()
        return seen

    assert run_training(get_core(), code) == [(0, 20.0), (1, 20.0), (2, 20.0)]


class MovesWeights(torch.optim.SGD):
    """As optimizers without a schedule do: they evaluate at other weights than they train."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.param_groups[0]["train_mode"] = True

    def turn(self, *, trains: bool) -> None:
        group = self.param_groups[0]
        if group["train_mode"] is not trains:
            for parameter in group["params"]:
                parameter.data.add_(-100.0 if trains else 100.0)
            group["train_mode"] = trains


def test_weights_that_are_moved_for_an_evaluation_come_back() -> None:
    def code(leaves: bool) -> float:
        reset_core()
        trial, totals = Trial(MovesWeights), Accumulator()
        for epoch in remaining_epochs_until(3):
            trial.optimizer.turn(trains=True)  # type: ignore[attr-defined]  # of the class above
            trial.train()
            trial.optimizer.turn(trains=False)  # type: ignore[attr-defined]
            trial.evaluate(totals, leaves=leaves and epoch == 1)
        trial.optimizer.turn(trains=True)  # type: ignore[attr-defined]
        return trial.model.weight.item()

    with pytest.raises(ReplicaExit):
        code(leaves=True)
    assert code(leaves=False) == 0.0


def test_weights_that_are_frozen_for_an_evaluation_do_not_keep_the_trial_from_leaving() -> None:
    trial, totals = Trial(), Accumulator()

    def code() -> None:
        for epoch in remaining_epochs_until(2):
            trial.train()
            trial.model.requires_grad_(False)
            trial.evaluate(totals, leaves=epoch == 1)
            trial.model.requires_grad_(True)

    with pytest.raises(ReplicaExit):
        code()


def test_a_look_at_the_data_ends_no_pass_that_the_trial_resumes_in() -> None:
    seen: list[int] = []

    def code(leaves: bool) -> None:
        reset_core()
        trial = Trial(batch=4)
        for epoch in remaining_epochs_until(2):
            next(iter(trial.training))
            for number, (x,) in enumerate(trial.training):
                trial.step(x)
                seen.extend(x.flatten().int().tolist())
                if leaves and (epoch, number) == (0, 2):
                    get_core().leaving.ask()

    with pytest.raises(ReplicaExit):
        code(leaves=True)
    code(leaves=False)
    assert seen == 2 * list(range(24))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_counts_once_whose_iterator_is_held_over_the_end_of_its_epoch(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice(bounds: BatchBounds, num_replicas: int) -> tuple[int, int]:
        return bounds.init_batch // (num_replicas * passes), passes - 1

    for module in (dist_core.data.batch_size, dist_core.training.loader, dist_core.training.training_loop):
        monkeypatch.setattr(module, "fixed_choice", choice)
    trial, seen = Trial(batch=4), []
    for _ in remaining_epochs_until(3):
        batches = iter(trial.training)
        for number in range(6 * passes):
            (x,) = next(batches)
            if number % passes == 0:
                trial.optimizer.zero_grad()
            trial.wrapped(x).mean().backward()
            trial.optimizer.step()
            seen += x.flatten().int().tolist()
    assert get_core().position.steps == 18
    assert seen == 3 * list(range(24))


def test_what_could_not_be_raised_then_is_raised_before_the_code_returns() -> None:
    runs = 0

    def code() -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            get_core().leaving.postpone(RunAgain(in_loop=True))
        return runs

    assert run_training(get_core(), code) == 2


def test_the_bound_of_memory_stays_where_the_code_runs_again() -> None:
    runs = 0

    def code() -> int | None:
        nonlocal runs
        runs += 1
        core = get_core()
        trial = Trial(samples=96)
        trial.training.autoscale_batch_size(64)
        for epoch in remaining_epochs_until(2):
            for (x,) in trial.training:
                if len(x) > 6 and core.position.steps >= 3:
                    raise torch.OutOfMemoryError("tried to allocate too much")
                trial.step(x)
            if runs == 2 and epoch == 0:
                as_after_a_loss()
        assert core.adaptation is not None
        return core.adaptation.bounds.largest_atomic

    assert run_training(get_core(), code) == 6
    assert runs == 3
