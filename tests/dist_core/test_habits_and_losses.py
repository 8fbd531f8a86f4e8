"""Training code as people write it goes on when a replica is lost, or leaves, wherever that happens."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as lr

import dist_core
import dist_core.generations.membership
import dist_core.trial.current
from dist_core import Accumulator
from dist_core.state.states import FunctionState
from tests.support.habits import (
    FROZEN,
    FROZEN_SECONDS,
    GROWN,
    LATE_IN_AN_EVALUATION,
    RESCALED,
    Habit,
    Kit,
    as_trial,
    examples,
    hear,
    in_plain_pytorch,
    network,
    weights_of,
    with_a_leaver,
    with_a_loss,
)
from tests.support.shared_habits import (
    a_forgotten_train,
    a_plateau_on_the_summed_metric,
    mse,
    simple,
    the_textbook,
    two_models_in_turns,
    two_optimizers_for_one_model,
)


def counted_by_all_reduce(kit: Kit) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 10)
    wrapped = kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        count = torch.zeros(1)
        with torch.no_grad():
            for x, _y in valid:
                count += len(x)
        if dist.is_initialized():
            dist.all_reduce(count)
        assert count in (60, 40), "a replica that is lost takes what it has seen with it"
    return weights_of(model)


def schedules_in_the_loop(kit: Kit) -> list[float]:
    """One of them follows a number that the replicas agree on, another has made its step by then."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules: list[Any] = [
        lr.ExponentialLR(optimizer, 0.9),
        lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5, cooldown=2),
    ]
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, schedules)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedules[0].step()
            schedules[1].step(1.0)
    return [*weights_of(model), optimizer.param_groups[0]["lr"]]


def asks_in_the_loop(kit: Kit) -> list[float]:
    """As ``trial.should_prune()`` does, between an update and the end of its step; it also reads sums there."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr.ExponentialLR(optimizer, 0.9)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer, schedule)
    totals = Accumulator() if kit.elastic else None
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            schedule.step()
            if totals is not None:
                answer = dist_core.trial.current.get_core().together(
                    lambda group: group.broadcast_json(7), otherwise=lambda: None
                )
                assert answer in (7, None)
                totals["count"] += len(x)
                with totals.synchronized():
                    assert totals.get("count", 0.0) >= 0.0
    if totals is not None:
        with totals.synchronized():
            assert totals["count"] == 3 * 96.0
    return weights_of(model)


def sums_of_evaluations(kit: Kit) -> list[float]:
    """Two evaluations an epoch, and what else code does between two training loops."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr.ExponentialLR(optimizer, 0.9)
    loader, valid = kit.loader(examples()), kit.loader(examples(60), 7)
    wrapped = kit.wrap(model, optimizer, schedule)
    found: dict[str, list[float]] = {"sums": []}
    if kit.elastic:
        dist_core.register_state("found", FunctionState(lambda: {"sums": list(found["sums"])}, found.update))
    for _ in kit.epochs(3):
        totals = Accumulator() if kit.elastic else None
        wrapped.train()
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
        schedule.step()
        wrapped.eval()
        for _part in range(2):
            sums = torch.zeros(1)
            with torch.no_grad():
                for x, _y in valid:
                    sums += len(x)
                    if totals is not None:
                        totals["count"] += len(x)
            if kit.elastic:
                dist.all_reduce(sums)
            found["sums"].append(float(sums))
        if totals is not None:
            with totals.synchronized():
                assert totals["count"] == 120.0
    return [*weights_of(model), *found["sums"], optimizer.param_groups[0]["lr"]]


class Remembers(nn.Module):
    """A queue of what came through it, and where that goes next, as in MoCo; and an average of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.average = nn.Linear(6, 1), nn.Linear(6, 1)
        self.average.requires_grad_(requires_grad=False).load_state_dict(self.encoder.state_dict())
        self.queue: torch.Tensor
        self.place: torch.Tensor
        self.register_buffer("queue", torch.zeros(10))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mine, averaged in zip(self.encoder.parameters(), self.average.parameters(), strict=True):
                    averaged.data = averaged.data * 0.9 + mine.data * 0.1
                self.queue[int(self.place)] = self.average.weight.mean()
                self.place = (self.place + 1) % 10
        made: torch.Tensor = self.encoder(x) + self.average(x).detach() + self.queue.sum()
        return made


def remembers(kit: Kit) -> list[float]:
    """A rate that a function sets behind each step, by its own count."""
    torch.manual_seed(0)
    model, rates = Remembers(), list[float]()

    def step(wrapped: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse(wrapped(x), y).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            rates[:] = [group["lr"]]

    weights = simple(kit, step, model=model)
    return [*weights, *model.queue.tolist(), float(model.place), *rates]


@pytest.mark.parametrize(
    ("trains", "place"),
    [
        (remembers, "in a step"),
        (sums_of_evaluations, "in an evaluation"),
        (sums_of_evaluations, LATE_IN_AN_EVALUATION),
        (sums_of_evaluations, "at the end of a loop"),
        (asks_in_the_loop, "in the body"),
        (asks_in_the_loop, "in a step"),
        (schedules_in_the_loop, "in the body"),
        (two_models_in_turns, "between two updates"),
        (two_optimizers_for_one_model, "between two updates"),
        (a_plateau_on_the_summed_metric, "in an evaluation"),
        (a_plateau_on_the_summed_metric, "at the end of a loop"),
        (counted_by_all_reduce, "at the end of a loop"),
        (counted_by_all_reduce, "in an evaluation"),
        (a_forgotten_train, "in an evaluation"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_survivors_of_a_loss_train_on_wherever_it_happens(trains: Habit, place: str) -> None:
    """No update is made twice, and none is left out."""
    survivors = with_a_loss(trains, place)
    assert survivors[1] is None
    for weights in (survivors[0], survivors[2]):
        assert weights == pytest.approx(in_plain_pytorch(trains), abs=1e-5)


def counts(kit: Kit, *, late: bool = False) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    counted = []
    for _ in kit.epochs(3):
        totals = Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(wrapped(x), y)
            if not late:
                totals["count"] += len(x)
            loss.backward()
            optimizer.step()
            if late:
                totals["count"] += len(x)
        with totals.synchronized():
            counted.append(totals["count"])
    return counted


def counts_late(kit: Kit) -> list[float]:
    return counts(kit, late=True)


def test_a_sum_counts_each_sample_once_although_a_replica_is_lost_and_a_body_runs_again() -> None:
    survivors = with_a_loss(counts, "in a step")
    assert survivors[0] == survivors[2] == [96.0, 96.0, 96.0]


def test_a_lost_replica_takes_along_what_it_added_after_its_last_step() -> None:
    survivors = with_a_loss(counts_late, "in a step")
    assert survivors[0] == survivors[2] == [96.0, 96.0 - 8.0, 96.0]


said: tuple[list[str]] = ([],)


def sums_over_two_batches(kit: Kit) -> list[str]:
    """Return what is logged of a lost replica while gradients of several batches are summed up."""
    # No list of the script's, which would be put back with its counts.
    hear(said[0])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for index, (x, y) in enumerate(loader):
            (mse(wrapped(x), y) / 2).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [each for each in said[0] if "enumerate() counts that batch twice" in each]


def test_counts_of_batches_are_told_of_where_a_lost_replica_repeats_one() -> None:
    first, lost, last = with_a_loss(sums_over_two_batches, "in a step")
    assert lost is None
    assert len(first) == len(last) == 1


batches_of_all = 0


class Progress:
    def __init__(self) -> None:
        self.batches = 0


class StepsOfItsOwn:
    """A loop in a function of its own, that counts batches and ends by their number."""

    def __init__(self, most: int) -> None:
        self.done, self.most = 0, most
        self.seen: dict[str, Any] = {"batches": 0, "rows": []}
        self.recent: deque[int] = deque(maxlen=3)
        self.progress = Progress()

    def __call__(self) -> None:
        """A criterion, say, which counts its calls."""
        self.recent.append(self.done)

    def one_epoch(self, loader: Any, optimizer: torch.optim.Optimizer, wrapped: Any, losses: list[float]) -> int:
        global batches_of_all
        batches = 0
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            self.done += 1
            self.progress.batches += 1
            self.seen["batches"] += 1
            self.seen[f"batch {self.done}"] = 1
            self.seen["rows"].append(1.0)
            self()
            for group in optimizer.param_groups:
                group["lr"] *= 0.97
            batches += 1
            batches_of_all += 1
            losses.append(float(len(losses)))
            if self.done == self.most:
                break
        return batches


def ends_by_its_own_count(kit: Kit) -> list[float]:
    global batches_of_all
    batches_of_all, total = 0, 0
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    steps, losses = StepsOfItsOwn(21), list[float]()
    for _ in kit.epochs(9):
        total += steps.one_epoch(loader, optimizer, wrapped, losses)
        if steps.done == steps.most:
            break
    numbers = [each for each in steps.seen.values() if isinstance(each, int)]
    return [
        total,
        *weights_of(model),
        steps.done,
        steps.progress.batches,
        batches_of_all,
        *losses,
        sum(numbers),
        len(steps.seen["rows"]),
        *steps.recent,
    ]


def test_counts_of_its_own_move_once_in_a_step_that_lost_a_replica() -> None:
    expected = in_plain_pytorch(ends_by_its_own_count)
    survivors = with_a_loss(ends_by_its_own_count, "in a step")
    for found in (survivors[0], survivors[2]):
        assert found == pytest.approx(expected, abs=1e-5)


def test_counts_of_its_own_come_to_a_replica_that_joins() -> None:
    expected = in_plain_pytorch(ends_by_its_own_count)
    first, *joined = as_trial(ends_by_its_own_count, GROWN)
    assert first == pytest.approx(expected, abs=1e-5)
    assert joined
    for found in joined:
        # But for a number of a function that begins with the epoch in which it joins.
        assert found[1:] == pytest.approx(expected[1:], abs=1e-5)


class Annealed(nn.Module):
    """A criterion whose weight follows a count of its own, as for the KL term of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return mse(outputs, y) * (1.0 + 0.1 * self.calls)


def anneals(kit: Kit) -> list[float]:
    model, criterion = network(), Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    for _ in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(wrapped(x), y).backward()
            optimizer.step()
    return [*weights_of(model), criterion.calls]


@pytest.mark.parametrize("replicas", [RESCALED, GROWN])
def test_numbers_of_a_scripts_modules_belong_to_the_trial(replicas: int) -> None:
    expected = in_plain_pytorch(anneals)
    for found in as_trial(anneals, replicas):
        assert found is None or found == pytest.approx(expected, abs=1e-5)


def many_sums(kit: Kit) -> list[dict[str, float]]:
    """More keys than ride in a step's round, of two accumulators, some of which only one replica adds to."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = kit.loader(examples())
    wrapped = kit.wrap(model, optimizer)
    totals, others = Accumulator(), Accumulator(others=1.0)
    summed = []
    for epoch in kit.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(wrapped(x), y)
            for number in range(20):
                totals[f"all-{number}"] += len(x)
            others["others"] += 1
            for number in range(15):
                others[f"{epoch}-{number}"] += len(x)
            loss.backward()
            optimizer.step()
        with totals.synchronized(), others.synchronized():
            summed.append({**totals, **others})
    return summed


def test_any_number_of_sums_survives_a_loss() -> None:
    survivors = with_a_loss(many_sums, "in a step")
    assert survivors[0] == survivors[2]
    for epoch, sums in enumerate(survivors[0]):
        assert len(sums) == 20 + 1 + 15 * (epoch + 1)
        assert {value for key, value in sums.items() if key != "others"} <= {96.0, 96.0 * (epoch + 1)}
    # A step of three replicas adds three, one of two adds two.
    assert survivors[0][-1]["others"] == 1 + 7 * 3 + 5 * 2


def takes_its_time(kit: Kit) -> tuple[list[float], float]:
    began = time.monotonic()
    return the_textbook(kit), time.monotonic() - began


def test_a_loss_that_no_connection_tells_of_is_heard_of_from_the_scheduler() -> None:
    survivors = with_a_loss(takes_its_time, FROZEN)
    expected = in_plain_pytorch(the_textbook)
    for weights, seconds in (survivors[0], survivors[2]):
        assert weights == pytest.approx(expected, abs=1e-5)
        assert seconds < FROZEN_SECONDS


@pytest.mark.parametrize("missed", ["before its update", "after its update"])
def test_who_misses_the_last_step_with_one_that_leaves_is_met_in_the_next_generation(missed: str) -> None:
    """As if the leaver's process had ended before its part of that step came through; the others cannot know."""
    left, *stayed = with_a_leaver(the_textbook, missed)
    assert left is None
    plain = in_plain_pytorch(the_textbook)
    for weights in stayed:
        assert weights == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_who_lacks_sums_that_others_have_made_with_one_that_leaves_does_not_go_on() -> None:
    """What it added would be counted twice, and the sums would differ: the trial goes on from its checkpoint."""
    assert with_a_leaver(many_sums, "its sums") == [None, None, None]
